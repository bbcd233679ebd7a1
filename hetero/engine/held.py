"""Prompts that are computed while some of their sequences have yet to begin."""

from __future__ import annotations

import torch

from hetero.engine.kv_cache import BlockManager
from hetero.engine.sequence import Prompt, Routes, Sequence


class HeldPrompts:
    """Keeps the blocks of such prompts, and the state to draw from, until all their sequences have begun."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._prompts: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def hold(self, leader: Sequence, hidden: torch.Tensor, route: Routes | None) -> None:
        """Keep the leader's blocks, last hidden state [H] and its experts; no-op when nobody waits."""
        prompt = leader.prompt
        prompt.leader = None
        if prompt.num_unstarted:
            prompt.hidden = hidden.clone()
            prompt.route = route
            prompt.blocks = list(leader.blocks)
            self._blocks.acquire(prompt.blocks)
            self._prompts.append(prompt)

    def let_go(self, prompt: Prompt) -> None:
        """Release a prompt if nobody waits for it any more."""
        if prompt.blocks is not None and not prompt.num_unstarted:
            self._prompts.remove(prompt)
            self._release(prompt)

    def drop(self) -> bool:
        """Release the youngest prompt, to be computed again for those who wait; False if there is none."""
        if not self._prompts:
            return False
        self._release(self._prompts.pop())
        return True

    def _release(self, prompt: Prompt) -> None:
        assert prompt.blocks is not None
        self._blocks.release(prompt.blocks)
        prompt.blocks = None
