"""Drawing the next token of many sequences at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hetero.engine.batch import runs_of
from hetero.engine.runner import Runs
from hetero.engine.sequence import Sequence
from hetero.kernels import ops

_MAX_LOGITS = 1 << 24  # fp32 logits held at a time (64 MiB), however many sequences run
_WORD = (1 << 64) - 1


class Sampler:
    """Draws tokens; a sequence's result depends on its own logits, parameters and stream only.

    Args:
        max_num_seqs: most rows of a call.
        vocab_size: V.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        self._max_rows = max(1, _MAX_LOGITS // vocab_size)
        self._floats = np.zeros((3, max_num_seqs), np.float32)  # temperature, top_p, min_p
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._keys = np.zeros((max_num_seqs, 4), np.uint64)

    def draw(
        self,
        sequences: list[Sequence],
        rows: list[int],
        hidden: torch.Tensor,
        names: list[str],
        logits: Callable[[torch.Tensor, Runs], torch.Tensor],
    ) -> tuple[list[int], list[float], list[float]]:
        """Draw one token per sequence.

        Args:
            sequences: B of them.
            rows: [B], which row of `hidden` each sequence draws from; several may share one.
            hidden: [R, H].
            names: [R], of the weights that computed each row.
            logits: maps hidden states [N, H], and which weights computed which, to fp32 logits [N, V].

        Returns:
            Per sequence: the id (-1 when its logits hold a NaN or +inf), its log-probability in the
            distribution that was drawn from, and the one before truncation.
        """
        self._fill(sequences)
        ids: list[int] = []
        logprobs: list[float] = []
        raw_logprobs: list[float] = []
        for start in range(0, len(sequences), self._max_rows):
            end = min(start + self._max_rows, len(sequences))
            unique, inverse = np.unique(rows[start:end], return_inverse=True)
            runs = runs_of((names[row], 1) for row in unique)
            chunk = logits(hidden[torch.from_numpy(unique)], runs)
            if len(unique) < end - start:
                chunk = chunk[torch.from_numpy(inverse)]
            temperature, top_p, min_p = (torch.from_numpy(values[start:end]) for values in self._floats)
            top_k, keys = torch.from_numpy(self._top_k[start:end]), torch.from_numpy(self._keys[start:end])
            drawn, of_drawn, raw = ops.sample(chunk, temperature, top_p, top_k, min_p, keys)
            ids += drawn.tolist()
            logprobs += of_drawn.tolist()
            raw_logprobs += raw.tolist()
        return ids, logprobs, raw_logprobs

    def _fill(self, sequences: list[Sequence]) -> None:
        n, params = len(sequences), [sequence.params for sequence in sequences]
        self._floats[0, :n] = [p.temperature for p in params]
        self._floats[1, :n] = [p.top_p for p in params]
        self._floats[2, :n] = [p.min_p for p in params]
        self._top_k[:n] = [p.top_k for p in params]
        self._keys[:n] = [
            (s.stream.seed & _WORD, s.stream.task & _WORD, s.stream.sample & _WORD, len(s.token_ids))
            for s in sequences
        ]
