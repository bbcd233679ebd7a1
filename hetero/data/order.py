"""The order in which tasks are drawn: a fresh permutation for every epoch, known from the seed alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hetero.errors import CheckpointError, DataError


class Draw(NamedTuple):
    """One task drawn: its row, and how many draws came before it in the run (the key of its random
    streams)."""

    row: int
    serial: int


class EpochOrder:
    """A cursor over endless epochs; each is a permutation of all rows that depends on (seed, epoch) only.

    Attributes:
        num_rows: rows of the data set.
        seed: seed of the permutations.
        serial: draws made so far.
    """

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        if num_rows < 1:
            raise DataError("There is nothing to draw from: the data set has no rows.")
        self.num_rows = num_rows
        self.seed = seed
        self.serial = 0
        self._permuted = -1
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, as a fraction."""
        return self.serial / self.num_rows

    def take(self, count: int) -> list[Draw]:
        """The next `count` draws; over the end of an epoch they go on in the next one."""
        draws = []
        for serial in range(self.serial, self.serial + count):
            epoch, position = divmod(serial, self.num_rows)
            draws.append(Draw(int(self._order(epoch)[position]), serial))
        self.serial += count
        return draws

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: plain numbers."""
        return {"num_rows": self.num_rows, "seed": self.seed, "serial": self.serial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises CheckpointError when it belongs to other data or another
        seed."""
        for name in ("num_rows", "seed"):
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"The checkpoint was made with {name} = {state[name]}, but it is {getattr(self, name)} "
                    "now. Resume with the same "
                    "data and seed, or start a new run."
                )
        self.serial = int(state["serial"])

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._permuted != epoch:
            # Only the raw words of a bit generator are the same for every version of NumPy; its shuffles may
            # change.
            words = np.random.Philox(key=np.array([self.seed % 2**64, epoch], np.uint64)).random_raw(
                self.num_rows
            )
            self._permutation = np.argsort(words, kind="stable")
            self._permuted = epoch
        return self._permutation
