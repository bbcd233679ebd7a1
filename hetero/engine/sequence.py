"""What the engine keeps of a sequence while it runs, and what it hands back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from hetero.engine.kv_cache import Namespace
    from hetero.engine.params import SamplingParams
    from hetero.engine.session import Session
    from hetero.engine.stop import StopChecker
    from hetero.engine.tiers.fetch import Fetch

Routes: TypeAlias = "npt.NDArray[np.integer[Any]]"
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence.

    Attributes:
        token_ids: sampled tokens, the end-of-sequence or stop token included.
        logprobs: per token, of the distribution that it was drawn from (temperature and truncation applied);
            each is exactly an fp32 number.
        raw_logprobs: per token, at the same temperature but before top-p, top-k and min-p.
        finish_reason: "stop" (end-of-sequence, stop id or stop string), "length" (max_tokens, or the end of
            the model's context), "abort" (see message).
        adapter_version: of the adapter that computed every token.
        num_cached_tokens: prompt tokens that were not computed for this sequence but found in the prefix
            cache or shared with a sequence of the same prompt.
        stop: the token id or string that ended the sequence when finish_reason is "stop".
        message: why the sequence was aborted.
        routes: [tokens, layers with experts, top_k] uint8 (uint16 with more than 256 experts), if the engine
            records them: the experts of the row from which each token was drawn, that is of the token before
            it. Not compared by ==.
    """

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: FinishReason
    adapter_version: int
    num_cached_tokens: int = 0
    stop: int | str | None = None
    message: str = ""
    routes: Routes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """What `Engine.stream` yields: one token as it comes.

    Attributes:
        token_id: None only when the sequence was aborted.
        logprob: as in `Completion.logprobs`.
        text: what can be shown now; it lags where a character is incomplete or a stop string may have begun.
        completion: with the last piece.
    """

    token_id: int | None
    logprob: float
    text: str
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """Names a random stream: token at position p of it is drawn with counter key (seed, task, sample, p)."""

    seed: int
    task: int
    sample: int


class Status(enum.Enum):
    """Where a sequence is; preemption leads from PREFILL or DECODE back to WAITING."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and the sequences that start from it: computed once, by the leader, and then forked.

    Attributes:
        token_ids: the prompt.
        namespace: of the KV cache in which its blocks live.
        hashes: ids of its full blocks, so far as they were needed.
        num_unstarted: sequences that have not begun yet.
        leader: the sequence that is computing the prompt now.
        blocks: the prompt's blocks, held for the sequences that have not begun; None unless computed.
        hidden: [H] final hidden state of the last prompt token, from which each sequence draws its first
            token.
        route: [layers, top_k] experts of that token, if they are recorded.
    """

    token_ids: list[int]
    namespace: Namespace
    hashes: list[bytes] = field(default_factory=list)
    num_unstarted: int = 0
    leader: Sequence | None = None
    blocks: list[int] | None = None
    hidden: torch.Tensor | None = None
    route: Routes | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in the engine.

    Attributes:
        index: place of the completion in the caller's list.
        arrival: rank in the first-come-first-served order over the engine's life.
        limit: number of tokens, prompt included, at which the sequence ends with "length".
        token_ids: prompt, then what was sampled.
        num_computed: leading tokens whose keys and values are in `blocks` (or will be when the scheduled
            step ends).
        blocks: cache blocks in order of position.
        hashes: content ids of the full blocks, so far as they were needed.
        slot: row in the engine's per-sequence arrays while the sequence runs, else -1.
        session: what it continues, and leaves its blocks to; None for a plain prompt.
        fetch: blocks that are on their way from disk while the sequence waits.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    stream: Stream
    limit: int
    stopper: StopChecker
    adapter_version: int
    token_ids: list[int]
    arrival: int = -1
    hashes: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int = 0
    slot: int = -1
    session: Session | None = None
    fetch: Fetch | None = None
    status: Status = Status.WAITING
    completion: Completion | None = None

    @property
    def fresh(self) -> bool:
        """No token has been sampled yet."""
        return len(self.token_ids) == len(self.prompt.token_ids)

    def finish(self, reason: FinishReason, *, stop: int | str | None = None, message: str = "") -> Completion:
        """Build the completion; the scheduler lets go of the resources."""
        self.status = Status.FINISHED
        self.completion = Completion(
            token_ids=self.token_ids[len(self.prompt.token_ids) :],
            logprobs=self.logprobs,
            raw_logprobs=self.raw_logprobs,
            finish_reason=reason,
            adapter_version=self.adapter_version,
            num_cached_tokens=self.num_cached_tokens,
            stop=stop,
            message=message,
            routes=np.stack(self.routes) if self.routes else None,
        )
        return self.completion
