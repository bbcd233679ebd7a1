"""Blocks on their way from disk to the sequence that will need them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from hetero.engine.tiers.block_file import BlockName


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block that was read: its payload [bytes_per_block] and the seconds that it took."""

    name: BlockName
    payload: npt.NDArray[np.uint8]
    seconds: float


class Fetch:
    """Consecutive blocks of one prompt, read one after the other until the first that is not on disk.

    Args:
        names: the blocks wanted.
        room: one unit for each block that may lie in RAM, waiting to be taken; shared by all fetches.

    Attributes:
        deadline: time after which computing would have been faster than waiting; None before anybody waits.
    """

    def __init__(self, names: Sequence[BlockName], room: threading.Semaphore) -> None:
        self.names = names
        self.deadline: float | None = None
        self._room = room
        self._arrived: deque[Arrived] = deque()
        self._changed = threading.Condition()
        self._over = self._cancelled = self._full = False

    # --- the reader's side

    def reserve(self) -> bool:
        """Wait for room for one more block; False when nobody wants it any more."""
        while not self._cancelled:
            if self._room.acquire(timeout=0.02):
                self._full = False
                return True
            self._full = True
        return False

    def put(self, block: Arrived) -> None:
        """Hand over a block for which there was room."""
        with self._changed:
            if self._cancelled:
                self._room.release()
            else:
                self._arrived.append(block)
                self._changed.notify()

    def give_back(self) -> None:
        """The reserved room is not needed."""
        self._room.release()

    def finish(self) -> None:
        """No more blocks come."""
        with self._changed:
            self._over = True
            self._changed.notify()

    # --- the engine's side

    @property
    def settled(self) -> bool:
        """Whether nothing more arrives before something is taken."""
        return self._over or self._full

    def take(self, name: BlockName) -> Arrived | None:
        """That block, skipping earlier ones; None when it does not come, or not before the deadline."""
        with self._changed:
            while True:
                while self._arrived:
                    block = self._arrived.popleft()
                    self._room.release()
                    if block.name == name:
                        return block
                left = 0.0 if self.deadline is None else self.deadline - perf_counter()
                if self._over or left <= 0:
                    return None
                self._changed.wait(left)

    def cancel(self) -> None:
        """Let go of what was read and stop reading."""
        with self._changed:
            self._cancelled = True
            for _ in range(len(self._arrived)):
                self._room.release()
            self._arrived.clear()
