"""Decisions of the policy's callback, and the lines that commands leave in the journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero.sandbox.audit import shortened
from hetero.sandbox.errors import PolicyDenied
from hetero.sandbox.policy import ALLOW, Decision, Event, Policy
from hetero.sandbox.result import Result

Log = Callable[..., None]


def decide(policy: Policy, event: Event, log: Log) -> Decision:
    """Ask the callback. A refusal is written to the journal and raised as PolicyDenied; so is a callback that
    fails, because what nobody has allowed is not allowed."""
    if policy.on_event is None:
        return ALLOW
    try:
        decision = policy.on_event(event)
    except Exception as error:
        decision = Decision("deny", f"the decision callback failed: {type(error).__name__}: {error}")
    if decision.verdict == "deny":
        log("denied", kind=event.kind, reason=decision.reason, **_detail(event.detail))
        raise PolicyDenied(f"The policy refused this {event.kind}: {decision.reason or 'no reason given'}.")
    return decision


def net_decision(policy: Policy, box: str, told: dict[str, Any], log: Log) -> str:
    """ "allow" or "deny" for a connection that the proxy tells of, written to the journal first."""
    event = told.pop("event")
    if event == "net" and told["decision"] == "allow" and policy.on_event is not None:
        detail = {name: value for name, value in told.items() if name != "decision"}
        try:
            decision = policy.on_event(Event("net", box, detail))
        except Exception as error:
            decision = Decision("deny", f"the decision callback failed: {type(error).__name__}: {error}")
        told |= {"decision": decision.verdict, "reason": decision.reason}
    log(event, **told)
    return "deny" if told["decision"] == "deny" else "allow"


def _detail(detail: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in detail.items() if name != "argv"}
    return {**(shortened(detail["argv"]) if "argv" in detail else {}), **rest}


def log_exec(
    log: Log,
    policy: Policy,
    argv: list[str],
    cwd: str,
    decision: Decision,
    result: Result | None,
    frame: dict[str, Any] | None,
) -> None:
    """One line for one command."""
    fields: dict[str, Any] = {**shortened(argv), "cwd": cwd}
    if decision.verdict != "allow":
        fields |= {"decision": decision.verdict, "decision_reason": decision.reason}
    if result is None or frame is None:
        log("exec", **fields, outcome="unknown")
        return
    changed = frame.get("changed", {"count": 0, "paths": []})
    log(
        "exec",
        **fields,
        exit=result.exit,
        signal=result.signal,
        reason=result.reason,
        oom=result.oom,
        truncated=result.truncated,
        wall_s=round(result.wall_s, 6),
        cpu_s=round(result.cpu_s, 6),
        max_rss=result.max_rss,
        bytes_out=result.bytes_out,
        num_changed=changed["count"],
        changed=changed["paths"],
        protected_hits=[path for path in changed["paths"] if is_protected(policy, path)],
    )


def is_protected(policy: Policy, path: str) -> bool:
    """Whether `path` lies at or below a protected one."""
    return any(
        path.rstrip("/") == spot.rstrip("/") or path.startswith(spot.rstrip("/") + "/")
        for spot in policy.protected
    )
