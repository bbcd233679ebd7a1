"""Which experts the tokens of a benchmark go to."""

from __future__ import annotations

import torch


def deal(tokens: int, top_k: int, num_experts: int, calls: int, seed: int = 0) -> list[torch.Tensor]:
    """Expert ids [tokens, top_k] int64 of each of `calls` calls, dealt like cards from a shuffled deck.

    Every expert comes once before any comes twice (but for the few that are left when top_k does not divide
    their number), within a call and from call to call, so small calls do not meet an expert again that a
    cache may still hold. The ids of a token differ.
    """
    generator = torch.Generator().manual_seed(seed)
    hands = num_experts // top_k
    decks = -(-tokens * calls // hands)
    dealt = [
        torch.randperm(num_experts, generator=generator)[: hands * top_k].view(hands, top_k)
        for _ in range(decks)
    ]
    return list(torch.cat(dealt)[: tokens * calls].split(tokens))


def calls_to_see_all(tokens: int, top_k: int, num_experts: int, at_least: int = 4) -> int:
    """Calls of `tokens` tokens after which every expert of a layer has been used."""
    return max(at_least, -(-(num_experts // top_k) // tokens))
