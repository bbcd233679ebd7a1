"""`hetero sandbox doctor`."""

from __future__ import annotations

import json

from hetero.sandbox.doctor import examine


def run(as_json: bool) -> int:
    """0 when sandboxes work here, 1 when something that they need fails."""
    checks = examine()
    fine = all(check.ok for check in checks if check.needed)
    if as_json:
        print(json.dumps({"ok": fine, "checks": [check.as_dict() for check in checks]}))
        return 0 if fine else 1
    for check in checks:
        mark = "ok  " if check.ok else "FAIL" if check.needed else "no  "
        print(f"{mark} {check.name:16} {check.detail}")
        if not check.ok:
            print(f"     cause: {check.cause}\n     fix:   {check.fix}")
    return 0 if fine else 1
