"""From what a caller asks to sequences that can run: every check happens here, before anything does."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from hetero.engine.kv_cache import BlockManager, Namespace
from hetero.engine.params import SamplingParams
from hetero.engine.runner import Runner
from hetero.engine.sequence import Prompt, Sequence, Stream
from hetero.engine.session import Session
from hetero.engine.stop import StopChecker
from hetero.errors import ArgumentError, CapacityError, ModelError
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
        prompts: Seq[Seq[int] | Session],
        params: SamplingParams | Seq[SamplingParams] | None,
        streams: Seq[tuple[int, int]] | None,
        version: int | None,
        blocks: BlockManager,
    ) -> list[Sequence]:
        """One sequence per prompt, in order; identical prompts share one `Prompt`. See `Engine.generate`."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ArgumentError(f"The prompts are {prompts!r:.80}; expected a list of lists of token ids.")
        prompts = list(prompts)
        params = SamplingParams() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if streams is None:
            streams = [p.stream if isinstance(p, Session) else (i, 0) for i, p in enumerate(prompts)]
        for name, values in (("params", each), ("streams", streams)):
            if len(values) != len(prompts):
                raise ArgumentError(
                    f"{len(values)} {name} for {len(prompts)} prompts; give one for each prompt."
                )
        if not all(isinstance(own, SamplingParams) for own in each):
            raise ArgumentError(f"The params are {params!r:.80}; expected SamplingParams, or a list of them.")
        namespace = blocks.namespace(self._runner.namespace(version))
        version = self._runner.adapter_version() if version is None else version
        sessions = [prompt for prompt in prompts if isinstance(prompt, Session)]
        if len(set(sessions)) < len(sessions):
            raise ArgumentError("A session is among the prompts twice; fork it to continue it in two ways.")
        known: dict[tuple[int, ...], Prompt] = {}
        stop_ids: dict[SamplingParams, frozenset[int]] = {}
        sequences = []
        for i, (asked, own, (task, sample)) in enumerate(zip(prompts, each, streams, strict=True)):
            session = asked if isinstance(asked, Session) else None
            began = None if session is None else session.adapter_version
            seed = self._seed if session is None else session.seed
            key = _token_ids(i, asked.token_ids if isinstance(asked, Session) else asked)
            prompt = known.get(key) if session is None else None
            if prompt is None:
                space = namespace if session is None else self._space(i, session, namespace, blocks)
                prompt = self._prompt(i, key, space)
                if session is None:
                    known[key] = prompt
            if own not in stop_ids:
                stop_ids[own] = self._stop_ids(own)
            sequences.append(
                Sequence(
                    index=i,
                    prompt=prompt,
                    params=own,
                    stream=Stream(seed if own.seed is None else own.seed, task, sample),
                    limit=self._limit(i, len(key), own, blocks),
                    stopper=StopChecker(stop_ids[own], own.stop, self._tokenizer),
                    adapter_version=version if began is None else began,
                    session=session,
                    token_ids=list(prompt.token_ids),
                )
            )
        return sequences

    def _space(self, index: int, session: Session, asked: Namespace, blocks: BlockManager) -> Namespace:
        """Where a session's blocks are: under the weights with which it began."""
        if session.running is not None:
            raise ArgumentError(f"Prompt {index} is a session that is being generated already; fork it.")
        if session.namespace is None:
            return asked
        if session.namespace not in self._runner.resident():
            raise ModelError(
                f"Prompt {index} is a session that began under {session.namespace}, which is not in memory "
                "any more. Begin a new one with its token_ids to continue under other weights."
            )
        return blocks.namespace(session.namespace)

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


def _token_ids(index: int, asked: object) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, asked))  # type: ignore[call-overload]  # what is no sequence is told so
    except TypeError as error:
        raise ArgumentError(
            f"Prompt {index} is {asked!r:.80}; expected token ids, a list of whole numbers. Encode text with "
            "the model's tokenizer."
        ) from error
