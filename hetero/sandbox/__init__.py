"""Sandboxes: isolated environments that snapshot, fork, pause and tell the truth about what ran in them."""

from __future__ import annotations

from hetero.sandbox.aio import AsyncSandbox
from hetero.sandbox.box_python import PythonResult
from hetero.sandbox.errors import (
    CapabilityUnavailable,
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
from hetero.sandbox.image import Image, oci_image
from hetero.sandbox.network import Network, Rule
from hetero.sandbox.policy import Event, Limits, Policy, deny, flag
from hetero.sandbox.pool import Pool
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.shell_grade import Run, ShellVerdict, grade_shell
from hetero.sandbox.snapshot import Snapshot
from hetero.sandbox.template import Template
from hetero.sandbox.tiers.bwrap import BubblewrapSandbox
from hetero.sandbox.tiers.gvisor import GvisorSandbox
from hetero.sandbox.tiers.landlock import LandlockSandbox
from hetero.sandbox.tiers.remote import RemoteSandbox

__all__ = [
    "AsyncSandbox",
    "BubblewrapSandbox",
    "CapabilityUnavailable",
    "DiskLimit",
    "Event",
    "GvisorSandbox",
    "Image",
    "ImageError",
    "IsolationUnavailable",
    "LandlockSandbox",
    "LimitUnavailable",
    "Limits",
    "Network",
    "Policy",
    "PolicyDenied",
    "Pool",
    "PythonResult",
    "RemoteSandbox",
    "Result",
    "Rule",
    "Run",
    "Sandbox",
    "SandboxDead",
    "SandboxError",
    "SandboxInfraError",
    "ShellVerdict",
    "Snapshot",
    "Template",
    "Verdict",
    "deny",
    "flag",
    "grade",
    "grade_shell",
    "oci_image",
]
