"""Sandboxes: isolated environments that snapshot, fork, pause and tell the truth about what ran in them."""

from __future__ import annotations

from hetero.sandbox.aio import AsyncSandbox
from hetero.sandbox.errors import (
    DiskLimit,
    ImageError,
    IsolationUnavailable,
    LimitUnavailable,
    PolicyDenied,
    SandboxDead,
    SandboxError,
    SandboxInfraError,
)
from hetero.sandbox.grade import Verdict, grade
from hetero.sandbox.image import Image
from hetero.sandbox.policy import Event, Limits, Policy, deny, flag
from hetero.sandbox.pool import Pool
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot

__all__ = [
    "AsyncSandbox",
    "DiskLimit",
    "Event",
    "Image",
    "ImageError",
    "IsolationUnavailable",
    "LimitUnavailable",
    "Limits",
    "Policy",
    "PolicyDenied",
    "Pool",
    "Result",
    "Sandbox",
    "SandboxDead",
    "SandboxError",
    "SandboxInfraError",
    "Snapshot",
    "Verdict",
    "deny",
    "flag",
    "grade",
]
