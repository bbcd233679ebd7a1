"""Templates: an interpreter with its imports done, from which every box of the template forks its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hetero.errors import ArgumentError
from hetero.sandbox.client import Launcher, boot_code
from hetero.sandbox.errors import CapabilityUnavailable, SandboxInfraError

_CODE = boot_code("hetero.sandbox.warm.start")


@dataclass(frozen=True)
class Template:
    """Give it to `Sandbox.create`; then `Sandbox.python` starts in milliseconds with the modules loaded.

    The modules are imported once, outside of any box and before any code of a model runs: name only what this
    machine's administrator has installed. Forks share no memory that they write, and draw their own random
    numbers.

    Attributes:
        imports: modules. They may start no threads.
        python: the interpreter, at a path where boxes see it, too; 3.10 or newer.
    """

    imports: tuple[str, ...] = ()
    python: str = "/usr/bin/python3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "imports", tuple(self.imports))
        for name in self.imports:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ArgumentError(f"Template.imports has {name!r}, which is no name of a module.")

    @property
    def key(self) -> str:
        """What tells it from others."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def start(self, launcher: Launcher) -> None:
        """Start its interpreter. Raises CapabilityUnavailable when a module cannot be imported."""
        details = {"python": self.python, "imports": list(self.imports), "code": _CODE}
        try:
            reply = launcher.ask("warm", self.key, details)
        except SandboxInfraError as error:
            raise CapabilityUnavailable(
                f"The template's interpreter {self.python} could not be started: {error}",
                "Name a Python of 3.10 or newer.",
            ) from error
        if "error" in reply:
            raise CapabilityUnavailable(
                f"The template cannot be made ready: {reply['error']}.",
                f"Install the module for {self.python}, or leave it out.",
            )
