"""A prefix tree of token sequences, laid out as rows that share what the sequences share.

Sequences that begin alike (the samples of a group begin with its prompt, all prompts with the same chat
template) walk the same nodes, so each common token is one row of the forward. Every node becomes one
attention segment: its own rows attend to the rows on the path from the root. Attention walks key-value
blocks by absolute position, so a row computes the same bits here as it would in its sequence alone.

Shapes: T rows, S segments (nodes), L tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


@dataclass
class _Node:
    """Tokens of positions `start ...` on the edge that leads here; `first_row` is set by `layout`."""

    tokens: Ints
    start: int
    children: dict[int, _Node] = field(default_factory=dict)
    first_row: int = -1


@dataclass(frozen=True)
class TreeLayout:
    """token_ids, positions [T]; the rest as in AttentionBatch: [S + 1], [S], [sum kv_len], [S + 1]."""

    token_ids: Ints
    positions: Ints
    q_start: Ints32
    kv_len: Ints32
    kv_rows: Ints32
    kv_start: Ints32


class PrefixTree:
    """Grows by whole sequences; `num_rows` is the number of distinct (prefix, token) pairs, that is rows."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int64), 0)
        self.num_rows = 0

    def shared(self, tokens: Ints) -> int:
        """How many leading tokens [L] are rows of the tree already."""
        return self._descend(tokens)[1]

    def insert(self, tokens: Ints) -> None:
        """Add the rows that `tokens` [L] does not share."""
        path, matched = self._descend(tokens)
        node = path[-1]
        offset = matched - node.start
        if offset < len(node.tokens):
            self._split(node, offset)
        if matched < len(tokens):
            node.children[int(tokens[matched])] = _Node(tokens[matched:], matched)
            self.num_rows += len(tokens) - matched

    def layout(self) -> TreeLayout:
        """Number the rows depth first, children in order of insertion, and list every segment."""
        nodes: list[_Node] = []
        kv_rows: list[Ints] = []
        row = 0
        stack: list[tuple[_Node, Ints]] = [(self._root, np.empty(0, np.int64))]
        while stack:
            node, above = stack.pop()
            if len(node.tokens):
                node.first_row = row
                above = np.concatenate([above, np.arange(row, row + len(node.tokens))])
                row += len(node.tokens)
                nodes.append(node)
                kv_rows.append(above)
            stack.extend((child, above) for child in reversed(node.children.values()))
        lengths = [len(node.tokens) for node in nodes]
        kv_len = [len(rows) for rows in kv_rows]
        return TreeLayout(
            token_ids=np.concatenate([node.tokens for node in nodes]),
            positions=np.concatenate([np.arange(n.start, n.start + len(n.tokens)) for n in nodes]),
            q_start=np.cumsum([0, *lengths], dtype=np.int32),
            kv_len=np.asarray(kv_len, np.int32),
            kv_rows=np.concatenate(kv_rows).astype(np.int32),
            kv_start=np.cumsum([0, *kv_len], dtype=np.int32),
        )

    def rows(self, tokens: Ints) -> Ints:
        """Row of each position [L] of an inserted sequence, after `layout`."""
        path, matched = self._descend(tokens)
        if matched < len(tokens) or path[-1].first_row < 0 < matched:
            raise ValueError("rows() is for inserted sequences, after layout()")
        return np.concatenate([np.arange(n.first_row, n.first_row + len(n.tokens)) for n in path])[
            : len(tokens)
        ]

    def _descend(self, tokens: Ints) -> tuple[list[_Node], int]:
        """Nodes from the root to where `tokens` leaves the tree, and how many tokens they share."""
        path, matched = [self._root], 0
        while matched < len(tokens):
            node = path[-1].children.get(int(tokens[matched]))
            if node is None:
                break
            path.append(node)
            edge = tokens[matched : matched + len(node.tokens)]
            differs = np.flatnonzero(edge != node.tokens[: len(edge)])
            step = int(differs[0]) if len(differs) else len(edge)
            matched += step
            if step < len(node.tokens):
                break
        return path, matched

    def _split(self, node: _Node, offset: int) -> None:
        """Cut the edge of `node` after `offset` tokens; the tail and its children move one node down."""
        tail = _Node(node.tokens[offset:], node.start + offset, node.children)
        node.tokens = node.tokens[:offset]
        node.children = {int(tail.tokens[0]): tail}
