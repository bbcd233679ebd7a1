"""What both sides of a paired benchmark run: the cases, their sizes and the record that each run returns."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CASES = ("decode", "prefill", "step")


@dataclass(frozen=True, slots=True)
class Workload:
    """One case of the paired benchmark.

    Attributes:
        case: "decode" (generate `new_tokens` for every sequence), "prefill" (read every prompt once) or
            "step" (forward and backward of `num_sequences` samples with LoRA, the loss on the completions).
        num_sequences: sequences that run at once.
        prompt_tokens: tokens of every prompt.
        new_tokens: tokens generated ("decode") or trained on ("step") after every prompt.
        lora_rank: rank of the LoRA in "step", on all linears and on the experts.
        group_size: samples that share one prompt ("step" and "decode"), as in group-based RL.
        seed: of the random token ids.
    """

    case: str
    num_sequences: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 32
    lora_rank: int = 16
    group_size: int = 8
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every sequence's prompt, shared by `group_size` neighbours unless "prefill"."""
        rng = np.random.default_rng(self.seed)
        share = 1 if self.case == "prefill" else self.group_size
        distinct = rng.integers(10, vocab_size, (-(-self.num_sequences // share), self.prompt_tokens))
        return [distinct[i // share].tolist() for i in range(self.num_sequences)]

    def completions(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every sequence's completion for "step"."""
        rng = np.random.default_rng(self.seed + 1)
        return list(rng.integers(10, vocab_size, (self.num_sequences, self.new_tokens)).tolist())

    def num_tokens(self) -> int:
        """Tokens that one run is credited with, the same for both sides: no credit for shared prompts."""
        per_sequence = {"decode": self.new_tokens, "prefill": self.prompt_tokens}
        each = per_sequence.get(self.case, self.prompt_tokens + self.new_tokens)
        return self.num_sequences * each


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one timed process reports: best seconds, tokens, peak resident bytes; our side also the sums of
    `hetero.bench.model_work.ModelWork` over the run."""

    side: str
    case: str
    seconds: float
    num_tokens: int
    peak_rss_bytes: int
    work: dict[str, Any] | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "tok_s": self.tokens_per_second}


def peak_rss_bytes() -> int:
    """Peak resident set of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
