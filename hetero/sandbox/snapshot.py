"""Snapshots: the upper layer of a box becomes a sealed layer. Nothing is copied; forks start over it."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hetero.sandbox.box_state import BoxState
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.merge import merge

B = TypeVar("B", bound=BoxState)
MOST_LAYERS = 48
"""Deeper stacks are flattened: opening files gets slow, and the options of a mount must fit on a page."""
_AT_ONCE = 4


@dataclass
class Snapshot(Generic[B]):
    """A sealed tree. Close it when no more boxes will be forked from it; boxes that were live on.

    Attributes:
        id: its name, in the journal of its children as `parent`.
        layers: directories, newest first.
        source: the box that it was taken from, for its image, policy and labels.
    """

    id: str
    layers: tuple[str, ...]
    source: B
    closed: bool = field(default=False)

    def fork(self, n: int = 1, **changes: Any) -> list[B]:
        """`n` new boxes over this tree. All are made, or none. `changes`: policy, labels."""
        if n <= 1:
            return [self._fork_one(changes) for _ in range(n)]
        made: list[B] = []
        errors: list[BaseException] = []
        with ThreadPoolExecutor(min(n, _AT_ONCE)) as threads:
            for future in [threads.submit(self._fork_one, changes) for _ in range(n)]:
                error = future.exception()
                if error is None:
                    made.append(future.result())
                else:
                    errors.append(error)
        if errors:
            for box in made:
                box.close()
            raise errors[0]
        return made

    def _fork_one(self, changes: dict[str, Any]) -> B:
        source = self.source
        shared = source._shared
        box = type(source)(
            shared,
            source.image,
            self.layers,
            changes.get("policy", source.policy),
            changes.get("labels", source.labels),
            changes.get("weaken", source._weaken),
            self.id,
        )
        box.template = source.template
        shared.hold(self.layers)
        try:
            box._start()
        except BaseException:
            shared.release(self.layers)
            raise
        box._log("fork")
        return box

    def close(self) -> None:
        """Let the layers go."""
        if not self.closed:
            self.closed = True
            self.source._shared.release(self.layers)

    def __enter__(self) -> Snapshot[B]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def seal(box: B, mode: str, restart: bool = True) -> Snapshot[B]:
    """Push the upper layer of `box` onto its layers. The box's lock is held."""
    shared = box._shared
    name = secrets.token_hex(6)
    if box.state == "hibernated":
        shared.hold(box._layers)
        return Snapshot(name, box._layers, box)
    target = shared.launcher.run.path / "layers" / name
    if mode == "frozen_copy" or box.policy.limits.disk_hard:
        _copy_frozen(box, target)
        if mode == "frozen_copy":
            layers = (str(target), *box._layers)
            shared.hold(layers)
            return Snapshot(name, layers, box)
        box._end_processes()
    else:
        restart &= _take_upper(box, target)
    older = box._layers
    box._layers = (str(target), *older)
    box._layers = flattened(box, box._layers)
    shared.hold(box._layers)  # the box's
    shared.hold(box._layers)  # the snapshot's
    shared.release(older)
    if restart:
        box._start()
    return Snapshot(name, box._layers, box)


def _take_upper(box: B, target: Path) -> bool:
    """Make the box's upper layer a sealed one, once none of its processes lives; whether they are gone."""
    directory = box._directory
    assert directory is not None
    if "seal" in box._weaken:
        (directory / "u").rename(target)
        return False
    box._directory = None
    box._end_processes()
    (directory / "u").rename(target)
    box._shared.launcher.janitor.take(directory)
    return True


def _copy_frozen(box: B, target: Path) -> None:
    """Copy the upper layer while every process of the box stands still."""
    box._shared.launcher.run.new_directory("layers", target.name)
    was_live = box.state == "live"
    for process in list(box._running):
        process.set_frozen("freeze")
    try:
        request = {"op": "copy", "target": str(target), "uid": box.policy.uid, "weaken": list(box._weaken)}
        reply = box._ask("work", {}, request)
        if "error" in reply:
            box._shared.launcher.janitor.take(target)
            raise SandboxInfraError(f"The snapshot could not be copied: {reply['error']}.")
    finally:
        if was_live:
            for process in list(box._running):
                process.set_frozen("thaw")


def flattened(box: B, layers: tuple[str, ...]) -> tuple[str, ...]:
    """The same tree in fewer layers, when there are too many."""
    if len(layers) <= MOST_LAYERS:
        return layers
    own = box._shared.launcher.run.path / "layers"
    merged = [layer for layer in layers if Path(layer).parent == own and not Path(layer).name.startswith("w")]
    target = box._shared.launcher.run.new_directory("layers", secrets.token_hex(6))
    merge(merged, str(target))
    box._shared.launcher.janitor.take(layers[0])
    return (str(target), *layers[len(merged) :])
