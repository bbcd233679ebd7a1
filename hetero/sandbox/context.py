"""What all boxes of this process share: the launcher, who holds which layer, the journal."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hetero.sandbox.audit import Audit
from hetero.sandbox.client import Launcher, launcher
from hetero.sandbox.store import store_root
from hetero.sandbox.template import Template


class Context:
    """One per launcher."""

    def __init__(self, process: Launcher) -> None:
        self.launcher = process
        self.audit = Audit(store_root() / "audit" / f"{process.run.path.name}.jsonl")
        self._held: Counter[str] = Counter()
        self._templates: set[Template] = set()
        self._lock, self._warming = threading.Lock(), threading.Lock()
        self._controllers: list[str] | None = None

    def controllers(self) -> list[str]:
        """Control groups that boxes get: of memory, pids, cpu those that this process may make."""
        if self._controllers is None:
            self._controllers = list(self.launcher.ask("state", "")["ok"]["groups"])
        return self._controllers

    def ready(self, template: Template) -> None:
        """Start a template's interpreter, unless it has been. Raises CapabilityUnavailable."""
        with self._warming:
            if template not in self._templates:
                template.start(self.launcher)
                self._templates.add(template)

    def hold(self, layers: Iterable[str]) -> None:
        """Keep sealed layers."""
        with self._lock:
            self._held.update(layers)

    def release(self, layers: Iterable[str]) -> None:
        """Let layers go; those that nobody holds any more and that were sealed here are removed."""
        gone = []
        with self._lock:
            for layer in layers:
                self._held[layer] -= 1
                if self._held[layer] <= 0:
                    del self._held[layer]
                    gone.append(layer)
        own = self.launcher.run.path / "layers"
        for layer in gone:
            if Path(layer).parent == own and not Path(layer).name.startswith("w"):
                self.launcher.janitor.take(layer)


_context: Context | None = None
_guard = threading.Lock()


def context() -> Context:
    """The context of this process's launcher, which is started if need be."""
    global _context
    process = launcher()
    with _guard:
        if _context is None or _context.launcher is not process:
            _context = Context(process)
        return _context
