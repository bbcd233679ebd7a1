"""From what a caller asks to sequences that can run: every check happens here, before anything does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from hetero.engine.kv_cache import BlockManager, Namespace
from hetero.engine.params import SamplingParams
from hetero.engine.runner import Runner
from hetero.engine.sequence import Prompt, Sequence, Stream
from hetero.engine.stop import StopChecker
from hetero.errors import ArgumentError, CapacityError
from hetero.kernels.batch import KV_BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Requests:
    """Checks requests and makes sequences.

    Args:
        runner: the model.
        tokenizer: for stop strings and its end-of-sequence id.
        seed: of streams whose parameters give none.
    """

    def __init__(self, runner: Runner, tokenizer: PreTrainedTokenizerBase | None, seed: int) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._seed = seed
        eos = None if tokenizer is None else tokenizer.eos_token_id
        self._eos_ids = runner.eos_ids | (frozenset() if eos is None else {int(eos)})

    def sequences(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None,
        streams: Seq[tuple[int, int]] | None,
        version: int | None,
        blocks: BlockManager,
    ) -> list[Sequence]:
        """One sequence per prompt, in order; identical prompts share one `Prompt`. See `Engine.generate`."""
        params = SamplingParams() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        streams = [(i, 0) for i in range(len(prompts))] if streams is None else streams
        for name, values in (("params", each), ("streams", streams)):
            if len(values) != len(prompts):
                raise ArgumentError(
                    f"{len(values)} {name} for {len(prompts)} prompts; give one for each prompt."
                )
        namespace = blocks.namespace(self._runner.namespace(version))
        version = self._runner.adapter_version() if version is None else version
        known: dict[tuple[int, ...], Prompt] = {}
        stop_ids: dict[SamplingParams, frozenset[int]] = {}
        sequences = []
        for i, (token_ids, own, (task, sample)) in enumerate(zip(prompts, each, streams, strict=True)):
            key = tuple(token_ids)
            prompt = known.get(key)
            if prompt is None:
                prompt = known[key] = self._prompt(i, key, namespace)
            if own not in stop_ids:
                stop_ids[own] = self._stop_ids(own)
            sequences.append(
                Sequence(
                    index=i,
                    prompt=prompt,
                    params=own,
                    stream=Stream(self._seed if own.seed is None else own.seed, task, sample),
                    limit=self._limit(i, len(key), own, blocks),
                    stopper=StopChecker(stop_ids[own], own.stop, self._tokenizer),
                    adapter_version=version,
                    token_ids=list(prompt.token_ids),
                )
            )
        return sequences

    def _prompt(self, index: int, token_ids: tuple[int, ...], namespace: Namespace) -> Prompt:
        if not token_ids:
            raise ArgumentError(
                f"Prompt {index} is empty; a prompt needs at least one token (such as the BOS token)."
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._runner.vocab_size:
            wrong = low if low < 0 else high
            raise ArgumentError(
                f"Prompt {index} holds the token id {wrong}; the model knows the ids 0 to "
                f"{self._runner.vocab_size - 1}. Was it tokenized for another model?"
            )
        return Prompt(list(token_ids), namespace)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.stop and self._tokenizer is None:
            raise ArgumentError(
                f"Stop strings {params.stop} need a tokenizer; make the engine with tokenizer=."
            )
        return frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self._eos_ids)

    def _limit(self, index: int, num_tokens: int, params: SamplingParams, blocks: BlockManager) -> int:
        """Number of tokens at which the sequence ends, prompt included."""
        context = self._runner.context_length
        if num_tokens >= context:
            raise CapacityError(
                f"Prompt {index} has {num_tokens} tokens; the model's context of {context} leaves no room "
                f"for a completion. Shorten it to at most {context - 1} tokens."
            )
        limit = min(num_tokens + params.max_tokens, context)
        room = blocks.num_blocks * KV_BLOCK + 1  # the last token is never fed back
        if limit > room:
            raise CapacityError(
                f"Prompt {index} has {num_tokens} tokens and may grow to {limit}; the KV cache holds "
                f"{room}. Give the engine more kv_memory, or lower max_tokens."
            )
        return limit
