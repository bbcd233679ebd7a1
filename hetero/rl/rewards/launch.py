"""Starts the reward supervisor: run as a script, by path, with the plainest possible interpreter.

Importing it as `hetero.rl.rewards.supervisor` would run the __init__ of three packages and with them torch.
So the packages stand here as empty shells while the supervisor's own two files are imported; then the shells
go, and a reward function that imports hetero gets the real one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_SHELLS = {
    "hetero": _FOLDER.parents[1],
    "hetero.rl": _FOLDER.parent,
    "hetero.rl.rewards": _FOLDER,
}

if __name__ == "__main__":
    sys.path.pop(0)
    for _name, _path in _SHELLS.items():
        _shell = ModuleType(_name)
        _shell.__path__ = [str(_path)]
        sys.modules[_name] = _shell

    from hetero.rl.rewards.supervisor import main

    for _name in _SHELLS:
        del sys.modules[_name]
    sys.exit(main())
