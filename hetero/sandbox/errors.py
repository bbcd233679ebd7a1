"""What can go wrong with sandboxes. Each error carries `fix`: what the user can do about it.

None of them is ever a reward: code that grades lets them pass, and the sample is masked and counted.
"""

from __future__ import annotations

from hetero.errors import ArgumentError, CapacityError, HeteroError, UnavailableError


class SandboxError(HeteroError, RuntimeError):
    """Base of the errors of sandboxes.

    Attributes:
        fix: what to do, a sentence or more; "" if there is nothing.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(f"{message} {fix}".strip())
        self.fix = fix


class IsolationUnavailable(SandboxError, UnavailableError):
    """This machine cannot give the isolation that was asked for. Nothing weaker was started instead."""


class LimitUnavailable(SandboxError, UnavailableError):
    """A limit was required to be hard and this tier can only watch it."""


class CapabilityUnavailable(SandboxError, UnavailableError):
    """This tier cannot do what was asked of it. Nothing else was done instead."""


class ImageError(SandboxError, ArgumentError):
    """An image is missing, cannot be read by sandboxes, or tries to escape while it is unpacked."""


class DiskLimit(SandboxError, CapacityError):
    """A box has no room left for what was to be written to it."""


class PolicyDenied(SandboxError):
    """The policy or the decision callback refused an action."""


class SandboxDead(SandboxError):
    """The box is closed, or its processes are gone."""


class SandboxInfraError(SandboxError):
    """Something of ours failed, not the command: its result is unknown. Mask the sample; never score it 0."""
