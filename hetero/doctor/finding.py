"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from hetero.errors import HeteroError

Value = str | int | float
Check = Callable[[], Iterator["Finding"]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        check: its name, such as "exact/threads".
        ok: whether all is well.
        value: what was measured or seen.
        fix: what to do; empty when all is well.
    """

    check: str
    ok: bool
    value: Value
    fix: str = ""

    def as_dict(self) -> dict[str, object]:
        """{check, ok, value, fix}."""
        return asdict(self)


def judge(check: str, ok: bool, value: Value, fix: str) -> Finding:
    """A finding that keeps `fix` for when it is needed."""
    return Finding(check, ok, value, "" if ok else fix)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """The findings of `check`; an error ends it with a red one instead of ending the doctor."""
    try:
        yield from check()
    except HeteroError as error:
        yield Finding(name, False, "failed", str(error))
    except Exception as error:
        yield Finding(
            name,
            False,
            f"{type(error).__name__}: {error}",
            "This is a defect of hetero; please report it with the output of `hetero doctor --json`.",
        )
