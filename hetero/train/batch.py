"""From samples to micro-batches: shared prefixes stored once, the LM head only where a token is trained.

A micro-batch is the prefix tree of some samples. The last trained token of a sample is a target and never
an input, so a sample of P prompt tokens and n completion tokens occupies at most P + n - 1 rows; a prompt
is there once for its whole group, and so is the beginning that completions share.

Shapes: T rows of a micro-batch, N trained tokens in it, U distinct (row, target) pairs among these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetero.errors import CapacityError, DataError
from hetero.kernels.batch import AttentionBatch
from hetero.models.forward import ForwardBatch
from hetero.train.prefix_tree import Ints, PrefixTree
from hetero.train.row_keys import RowKeys


@dataclass(frozen=True)
class TrainSample:
    """One trajectory, tokens as the sampler saw them.

    logprobs: log-probability of each completion token under the policy that sampled it, at the sampling
        temperature; None when unknown (sft). Values at masked tokens are not read; NaN means unknown, and the
        ratio of that token is then 1.
    advantage: one number for the sample, or one per completion token.
    mask: which completion tokens the model sampled and may learn from; None for all. Tool output is False.
    group: samples of one task carry one number.
    adapter_version: version that sampled it; None: current.
    routes: [sampled tokens, layers with experts, top_k] experts of the row from which each token with mask
        True was drawn, for the trainer to select again; see `Completion.routes`.
    proximal_logprobs: as `logprobs`, under the policy from which the update starts: what `Trainer.score`
        gives before the first of several updates with one batch. Read with a correction; None: the policy of
        now.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    advantage: float | Sequence[float] = 1.0
    mask: Sequence[bool] | None = None
    group: int = 0
    adapter_version: int | None = None
    routes: npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    proximal_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        if not len(self.prompt_ids):
            raise DataError(
                "prompt_ids is empty: the first completion token needs at least one token (BOS) before it"
            )
        for name in ("logprobs", "mask", "advantage", "proximal_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float) and len(value) != num_tokens:
                raise DataError(f"{name} has {len(value)} values for {num_tokens} completion tokens")
        if self.routes is not None and len(self.routes) != self.trained.sum():
            raise DataError(
                f"routes has {len(self.routes)} tokens, but mask says that {self.trained.sum()} were sampled"
            )
        if not np.isfinite(self.advantage).all():
            raise DataError(
                f"advantage is {self.advantage}; mask the sample instead of giving it no finite advantage"
            )

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """[completion tokens] which of them are trained."""
        return np.ones(len(self.completion_ids), bool) if self.mask is None else np.asarray(self.mask, bool)

    @property
    def is_flat(self) -> bool:
        """Whether every trained token has advantage zero."""
        return not np.any(np.broadcast_to(self.advantage, len(self.completion_ids))[self.trained])


@dataclass(frozen=True)
class MicroBatch:
    """One forward and its targets; tensors on the CPU.

    head_rows, head_targets [U]: rows of the hidden states for the LM head and the token each must predict.
    pairs [N]: index into these of every trained token, samples in order, tokens in order.
    samples [N]: index of each token's sample in the list given to `pack`; offsets [N]: its place in there.
    num_tokens: tokens of the samples, prompts and completions, without sharing; num_rows: T, with sharing.
    routes [T, layers, top_k] int16: recorded experts of the rows, -1 where there are none; None when no
        sample has any. Samples share a row only where they have the same record, or none.
    """

    forward: ForwardBatch
    head_rows: Tensor
    head_targets: Tensor
    pairs: Tensor
    samples: Tensor
    offsets: Tensor
    num_tokens: int
    num_rows: int
    routes: Tensor | None = None


@dataclass(frozen=True)
class _Row:
    """A sample on its way into a tree: `keys` need rows, `offsets` are its targets, `routes` belong to the
    rows `routed`."""

    index: int
    keys: Ints
    completion: Ints
    prompt_len: int
    offsets: Ints
    routed: Ints
    routes: npt.NDArray[np.integer[Any]] | None


def check_token_ids(batch: MicroBatch, vocab_size: int) -> None:
    """Raise DataError for an id that the model's embedding does not have."""
    ids = batch.forward.token_ids
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise DataError(
            f"a sample holds the token id {int(wrong[0])}; the model knows the ids 0 to {vocab_size - 1}. "
            "Was it tokenized for another model?"
        )


def pack(
    samples: Sequence[TrainSample], max_rows: int, *, context: float = math.inf, every_token: bool = False
) -> list[MicroBatch]:
    """Cut `samples` into micro-batches of at most `max_rows` rows, groups together, in order of appearance.

    A sample longer than `max_rows` gets a micro-batch of its own; one longer than `context` raises
    CapacityError. Samples without a trained token appear in none. With `every_token`, for scoring, masked
    tokens are targets too.
    """
    first_of_group: dict[int, int] = {}
    for sample in samples:
        first_of_group.setdefault(sample.group, len(first_of_group))
    order = sorted(range(len(samples)), key=lambda i: (first_of_group[samples[i].group], i))
    batches: list[MicroBatch] = []
    tree, rows, keys = PrefixTree(), list[_Row](), RowKeys()
    for index in order:
        row = _prepare(index, samples[index], context, every_token, keys)
        if row is None:
            continue
        if rows and tree.num_rows + len(row.keys) - tree.shared(row.keys) > max_rows:
            batches.append(_finish(tree, rows, keys))
            tree, rows = PrefixTree(), []
        tree.insert(row.keys)
        rows.append(row)
    if rows:
        batches.append(_finish(tree, rows, keys))
    return batches


def _prepare(
    index: int, sample: TrainSample, context: float, every_token: bool, keys: RowKeys
) -> _Row | None:
    """The rows sample number `index` needs, or None when it has no target."""
    length = len(sample.prompt_ids) + len(sample.completion_ids)
    if length > context:
        raise CapacityError(
            f"sample {index} has {len(sample.prompt_ids)} prompt and {len(sample.completion_ids)} completion "
            f"tokens, {length} in all; the context of the model is {context:.0f}. Lower max_tokens or drop"
            " the longest prompts."
        )
    trained = np.ones(len(sample.completion_ids), bool) if every_token else sample.trained
    offsets = np.flatnonzero(trained)
    if not len(offsets):
        return None
    completion = np.asarray(sample.completion_ids, np.int64)
    prompt = np.asarray(sample.prompt_ids, np.int64)
    inputs = np.concatenate([prompt, completion[: offsets[-1]]])
    routed = len(prompt) - 1 + np.flatnonzero(sample.trained)
    own = keys.of(inputs, routed, sample.routes)
    return _Row(index, own, completion, len(prompt), offsets, routed, sample.routes)


def _finish(tree: PrefixTree, rows: list[_Row], keys: RowKeys) -> MicroBatch:
    layout = tree.layout()
    target_rows = np.concatenate([tree.rows(row.keys)[row.prompt_len - 1 + row.offsets] for row in rows])
    targets = np.concatenate([row.completion[row.offsets] for row in rows])
    unique, pairs = np.unique(np.stack([target_rows, targets]), axis=1, return_inverse=True)
    attention = AttentionBatch(
        q_start=torch.from_numpy(layout.q_start),
        kv_len=torch.from_numpy(layout.kv_len),
        kv_rows=torch.from_numpy(layout.kv_rows),
        kv_start=torch.from_numpy(layout.kv_start),
    )
    return MicroBatch(
        forward=ForwardBatch(
            token_ids=torch.from_numpy(keys.tokens(layout.token_ids)),
            positions=torch.from_numpy(layout.positions),
            attention=attention,
        ),
        head_rows=torch.from_numpy(unique[0].copy()),
        head_targets=torch.from_numpy(unique[1].copy()),
        pairs=torch.from_numpy(pairs.reshape(-1)),
        samples=torch.from_numpy(np.repeat([row.index for row in rows], [len(row.offsets) for row in rows])),
        offsets=torch.from_numpy(np.concatenate([row.offsets for row in rows])),
        num_tokens=sum(row.prompt_len + len(row.completion) for row in rows),
        num_rows=tree.num_rows,
        routes=_routes(tree, rows),
    )


def _routes(tree: PrefixTree, rows: list[_Row]) -> Tensor | None:
    """What is known of each row's experts. A token's row is that of the token before it."""
    found: npt.NDArray[np.int16] | None = None
    for row in rows:
        if row.routes is None:
            continue
        if found is None:
            found = np.full((tree.num_rows, *row.routes.shape[1:]), -1, np.int16)
        found[tree.rows(row.keys)[row.routed]] = row.routes
    return None if found is None else torch.from_numpy(found)
