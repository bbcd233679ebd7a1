"""Sampling of tokens: counter-based random numbers, independent of batch composition and of scheduling."""

from __future__ import annotations

import torch

from hetero.kernels.cpu import sampling
from hetero.kernels.cpu.context import context


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row, by inverse CDF in vocabulary order.

    A row's result depends on that row alone: not on the batch, the number of threads or earlier calls.

    Args:
        logits: [B, V] fp32 on the CPU; -inf masks a token.
        temperature: [B]; 0 takes the largest logit, ties to the lower id.
        top_p: [B], keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
        top_k: [B], keep the k most likely tokens; 0 keeps all.
        min_p: [B], drop tokens less likely than min_p times the most likely one; 0 keeps all.
            Order: temperature, top-k, top-p over what top-k left, min-p; ties go to the lower id.
        keys: [B, 4] uint64 (or int64): seed, task, sample, position. Philox 4x32-10 (Salmon et al., SC 2011)
            turns them into one number in (0, 1).

    Returns:
        (ids [B] int64, log-probability under the distribution that was sampled [B] fp32, log-probability
        under softmax(logits / temperature) [B] fp32). Greedy rows: 0, log-probability at temperature 1.
        A row with NaN or +inf, or nothing but -inf, gives id -1 and NaN.

    Raises:
        ShapeError: shapes, dtypes or values are not as above.
    """
    return sampling.sample(context(), logits, temperature, top_p, top_k, min_p, keys)
