"""What came of a command, measured from outside the box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """End of a command.

    Attributes:
        exit: exit status, None if a signal ended it; 127 and 126 also when it could not be executed.
        signal: the signal that ended it.
        reason: the limit that ended it: "timeout", "memory", "cpu", "disk", "output", "processes"; or
            "killed", "closed"; "" when it ended by itself.
        oom: it, or a process of it, was killed for memory.
        truncated: the middle of the output is left out.
        stdout, stderr: what was kept of its output.
        bytes_out: bytes that it wrote in all.
        wall_s, cpu_s, max_rss: seconds, seconds of CPU of all its processes, bytes; the last two are 0 where
            the tier does not tell them.
        start_s: seconds from the call to the command's exec.
        failure: why it could not be executed (no such file, not permitted); "" when it was. Unlike `exit` and
            `stderr`, nothing in the box can forge it.
    """

    exit: int | None
    signal: int | None
    reason: str
    oom: bool
    truncated: bool
    stdout: str
    stderr: str
    bytes_out: int
    wall_s: float
    cpu_s: float
    max_rss: int
    start_s: float
    failure: str = ""

    @property
    def timed_out(self) -> bool:
        """Whether the deadline ended it."""
        return self.reason == "timeout"

    @property
    def ok(self) -> bool:
        """Whether it exited with status 0 by itself."""
        return self.exit == 0 and not self.reason

    @property
    def status(self) -> int:
        """One number, as a shell has it: 128 + signal; 124 after a deadline."""
        if self.timed_out:
            return 124
        return self.exit if self.exit is not None else 128 + (self.signal or 0)


def result_of(frame: dict[str, Any], oom_kills: int = 0) -> Result:
    """Result of a worker's last frame."""
    stderr = frame["stderr"].decode("utf-8", "replace")
    status = frame["exit"]
    if frame["failure"]:
        stderr += f"sandbox: {frame['failure']}\n"
        status = 127 if frame["errno"] == 2 else 126
    return Result(
        exit=status,
        signal=frame["signal"],
        reason=frame["reason"],
        oom=frame["reason"] == "memory" or oom_kills > 0,
        truncated=frame["truncated"],
        stdout=frame["stdout"].decode("utf-8", "replace"),
        stderr=stderr,
        bytes_out=frame["bytes_out"],
        wall_s=frame["wall_s"],
        cpu_s=frame["cpu_s"],
        max_rss=frame["max_rss"],
        start_s=frame["start_s"],
        failure=frame["failure"],
    )
