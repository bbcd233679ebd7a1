"""Sandbox: an isolated file tree and the commands that run in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from hetero.errors import ArgumentError
from hetero.sandbox import isolation
from hetero.sandbox.box_files import BoxFiles
from hetero.sandbox.box_python import BoxPython
from hetero.sandbox.context import context
from hetero.sandbox.errors import CapabilityUnavailable, ImageError
from hetero.sandbox.image import Image, as_image, workspace_layer
from hetero.sandbox.oci.cache import hold
from hetero.sandbox.policy import Policy
from hetero.sandbox.snapshot import Snapshot, seal
from hetero.sandbox.template import Template

Self = TypeVar("Self", bound="Sandbox")
_KINDS: dict[str, type[Sandbox]] = {}


class Sandbox(BoxFiles, BoxPython):
    """A box. Make one with `Sandbox.create`; use it in a `with` block, or `close` it.

    Any thread may call any method. All of it also exists for asyncio: see AsyncSandbox.

    Attributes:
        id: a name that is never used again.
        parent: id of the snapshot that it came from, "" for none.
        policy: what it may do.
        image: what its tree started from.
    """

    @classmethod
    def create(
        cls: type[Self],
        image: Image | str | Path | None = None,
        *,
        policy: Policy | None = None,
        tier: str = "ns",
        min_isolation: str = "ns",
        labels: Mapping[str, str] | None = None,
        template: Template | None = None,
        _weaken: tuple[str, ...] = (),
    ) -> Self:
        """A new box.

        Args:
            image: None for the host's programs; a directory; or an Image.
            tier: what holds the box in: "ns", "landlock", "bwrap", "gvisor", "microvm".
            min_isolation: the weakest tier that will do (isolation.TIERS). Nothing weaker is ever started: a
                weaker `tier` than the default has to be named here, too.
            labels: for the journal.
            template: an interpreter with its imports done, from which `python` forks. Tier ns, images of the
                host only.

        Raises IsolationUnavailable, CapabilityUnavailable, LimitUnavailable, ImageError, SandboxInfraError.
        """
        isolation.rank(min_isolation)
        kind = cls._of_tier(tier)
        found, shared = kind._image(image), context()
        if template is not None:
            if kind.tier != "ns" or not found.host:
                raise CapabilityUnavailable(
                    "A template forks this machine's interpreter, which only boxes of the tier ns over the "
                    "host's programs can take in.",
                    "Leave the template out; Sandbox.python starts the image's own python3.",
                )
            shared.ready(template)
        layers = found.layers
        for layer in layers:
            if not hold(layer):
                raise ImageError(f"The image's layer {layer} is gone.", "Load the image again.")
        if found.workspace:
            layers = (workspace_layer(shared.launcher.run, found.workspace), *layers)
        box = kind(shared, found, layers, policy or Policy(), labels or {}, _weaken)
        box.template = template
        shared.hold(layers)
        try:
            box._start(min_isolation)
        except BaseException:
            shared.release(layers)
            raise
        box._log("create", tier=box.isolation.tier)
        return box

    def __init_subclass__(cls, tier: isolation.Tier | None = None, **options: object) -> None:
        super().__init_subclass__(**options)
        if tier is not None:
            cls.tier = tier
            _KINDS[tier] = cls

    @classmethod
    def _of_tier(cls: type[Self], tier: str) -> type[Self]:
        if tier == cls.tier:
            return cls
        isolation.rank(tier)
        kind = _KINDS.get(tier)
        if kind is None or not issubclass(kind, cls):
            known = ", ".join(("ns", *_KINDS))
            raise ArgumentError(f"No sandbox is made as tier {tier!r}; name one of {known}.")
        return kind

    @classmethod
    def _image(cls, image: Image | str | Path | None) -> Image:
        return as_image(image)

    def snapshot(self, mode: Literal["stop", "frozen_copy"] = "stop") -> Snapshot[Sandbox]:
        """Seal what has been written as a layer that boxes can be forked from.

        "stop" ends the box's commands and goes on over the new layer: exact, and its cost does not depend on
        how much was written. "frozen_copy" stops commands for as long as the copy takes, and goes on with
        them.
        """
        with self._lock:
            self._need("live", "frozen", "hibernated")
            found = self._seal(mode)
            self._log("snapshot", snapshot=found.id, mode=mode)
            return found

    def _seal(self, mode: str, restart: bool = True) -> Snapshot[Sandbox]:
        return seal(self, mode, restart)

    def fork(self, n: int = 1) -> list[Sandbox]:
        """`n` boxes that continue from here, each on its own; this one goes on, too."""
        with self.snapshot() as snap:
            return snap.fork(n)

    def pause(self, mode: Literal["freeze", "hibernate"] = "freeze") -> None:
        """ "freeze" stops all processes and keeps their memory; "hibernate" ends them and keeps the files."""
        with self._lock:
            self._need("live")
            if mode == "freeze":
                for process in list(self._running):
                    process.set_frozen("freeze")
                self._state = "frozen"
            else:
                self._seal("stop", restart=False).close()
                self._state = "hibernated"
            self._log("pause", mode=mode)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._lock:
            self._need("frozen", "hibernated")
            if self._state == "frozen":
                for process in list(self._running):
                    process.set_frozen("thaw")
                self._state = "live"
            else:
                self._start()
            self._log("resume")

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
