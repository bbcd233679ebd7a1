"""What makes two rows of a batch the same: their token and, where experts are replayed, their experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.train.prefix_tree import Ints


class RowKeys:
    """Numbers rows so that equal numbers, after equal beginnings, promise equal hidden states.

    A row whose experts are chosen anew has its token id. One whose experts were recorded has a negative
    number that stands for token and experts: samples of different adapter versions share a row only as long
    as their records agree, and none with a sample whose experts are chosen anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], int] = {}
        self._tokens: list[int] = []

    def of(self, tokens: Ints, routed: Ints, routes: npt.NDArray[np.integer[Any]] | None) -> Ints:
        """Keys [L] of tokens [L]; rows `routed` [R] have the experts `routes` [R, layers, top_k]."""
        if routes is None:
            return tokens
        keys = tokens.copy()
        plain = np.ascontiguousarray(routes, np.int16)
        for row, route in zip(routed.tolist(), plain, strict=True):
            token = int(tokens[row])
            number = self._known.setdefault((token, route.tobytes()), len(self._tokens))
            if number == len(self._tokens):
                self._tokens.append(token)
            keys[row] = -1 - number
        return keys

    def tokens(self, keys: Ints) -> Ints:
        """Undo of `of`."""
        if not self._tokens:
            return keys
        return np.where(keys < 0, np.asarray(self._tokens, np.int64)[-1 - np.minimum(keys, -1)], keys)
