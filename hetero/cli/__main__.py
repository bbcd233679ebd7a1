"""`python -m hetero.cli`, the same as `hetero`."""

from __future__ import annotations

from hetero.cli.app import main

main()
