"""The engine's front: checks requests, runs steps until they are done, hands back completions."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from hetero.engine.generation import Generation
from hetero.engine.model_runner import ModelRunner
from hetero.engine.params import SamplingParams, parse_bytes
from hetero.engine.requests import Requests
from hetero.engine.runner import Runner, is_base
from hetero.engine.sequence import Completion, Piece, Sequence
from hetero.engine.session import Session
from hetero.engine.sessions import SessionMethods
from hetero.engine.stats import EngineStats
from hetero.engine.stepper import Stepper
from hetero.engine.stop import TextStream
from hetero.engine.tiers.make import make_tiers
from hetero.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DISK_SIZE = "16GiB"
"""Of `kv_disk`, unless told otherwise."""


class Engine(SessionMethods):
    """Generates completions with a model that someone else may train between calls.

    Results depend on the model, the prompt, the parameters and the random stream of a sequence only: not on
    the other sequences, `max_num_seqs`, `prefill_chunk`, or what the KV cache, `kv_ram` and `kv_disk` hold.

    Args:
        model: from `load_model` (or a `Runner` of your own).
        tokenizer: needed for stop strings and for text in `stream`; its end-of-sequence id ends sequences
            too.
        max_num_seqs: sequences that may run at once.
        kv_memory: of the KV cache, allocated here and once: bytes, or such as "1GiB".
        kv_ram: RAM for blocks that the KV cache had no room for; 0 is none.
        kv_disk: directory of files for blocks that outlive this engine; any number of processes, also with
            other models, may share it. Damaged files are computed again, never used.
        kv_disk_size: most bytes of all files in `kv_disk`; those used longest ago go first.
        prefill_chunk: prompt tokens computed per step, beside the running sequences' tokens.
        seed: of the random streams where `SamplingParams.seed` is None.
        record_routing: keep the ids of the experts that each token was drawn from; see `Completion.routes`.

    Raises:
        ArgumentError: a setting has a value that makes no sense.
        CapacityError: kv_memory, kv_ram or kv_disk_size holds less than one block.
        UnavailableError: kv_disk cannot be written.
    """

    def __init__(
        self,
        model: PreTrainedModel | Runner,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_num_seqs: int = 64,
        kv_memory: int | str = "1GiB",
        kv_ram: int | str = 0,
        kv_disk: str | os.PathLike[str] | None = None,
        kv_disk_size: int | str = DISK_SIZE,
        prefill_chunk: int = 512,
        seed: int = 0,
        record_routing: bool = False,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ArgumentError(f"Engine({name}={value}); expected at least 1.")
        runner: Runner
        if isinstance(model, Runner):
            runner = model
        else:
            runner = ModelRunner(model, kv_memory=parse_bytes(kv_memory), record_routing=record_routing)
        self._tokenizer = tokenizer
        self._stats = EngineStats()
        tiers = make_tiers(runner.store, self._stats, ram=kv_ram, disk=kv_disk, disk_size=kv_disk_size)
        self._stepper: Stepper | None = Stepper(
            runner, tiers, self._stats, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk
        )
        self._seed = seed
        self._requests = Requests(runner, tokenizer, seed)
        self._heard_by: dict[Sequence, Generation] = {}
        self._news: deque[Sequence] = deque()  # got a token or ended, and nobody was told yet

    @property
    def stats(self) -> EngineStats:
        """Counts and seconds since the engine was made."""
        return self._stats

    def generate(
        self,
        prompts: Seq[Seq[int] | Session],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        streams: Seq[tuple[int, int]] | None = None,
        version: int | None = None,
        on_token: Callable[[int, int], None] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts.

        Args:
            prompts: token ids, or sessions to continue. Identical prompts are computed once.
            params: for all, or one for each prompt.
            streams: (task, sample) ids of the random stream of each prompt; (i, 0) by default, and a
                session's own.
            version: of the adapter to sample with, one that is in memory; by default what the model computes
                now. A session stays with the version that it began with, and a sequence is finished under its
                own, whatever is trained meanwhile, as long as that stays in memory.
            on_token: called with (index of the prompt, token id) as tokens come.
            on_finish: called with (index of the prompt, completion) as sequences end.

        Returns: completions in the order of the prompts. One whose logits turned NaN, or whose version is
            gone, has finish_reason "abort".

        Raises:
            ArgumentError: an empty prompt, an unknown token id, lists of unequal length, stop strings
                without tokenizer.
            CapacityError: a prompt does not fit in the model's context or, with max_tokens, in kv_memory.
            ModelError: the version, or a session's, is not in memory. In all these cases nothing ran.
        """
        generation = self.begin(
            prompts, params, streams=streams, version=version, on_token=on_token, on_finish=on_finish
        )
        try:
            while not generation.done:
                self.step()
            self._tell()
        finally:
            self.cancel(generation)
        return generation.completions

    def begin(
        self,
        prompts: Seq[Seq[int] | Session],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        streams: Seq[tuple[int, int]] | None = None,
        version: int | None = None,
        on_token: Callable[[int, int], None] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> Generation:
        """Queue prompts, to be completed as anybody calls `step`. Arguments and errors as in `generate`."""
        stepper = self._open()
        sequences = self._requests.sequences(prompts, params, streams, version, stepper.blocks)
        generation = Generation(sequences, on_token, on_finish)
        self._heard_by.update(dict.fromkeys(sequences, generation))
        stepper.add(sequences)
        return generation

    def step(self) -> bool:
        """Carry every live sequence one token forward and call who listens; False when there is none."""
        stepper = self._open()
        if not self._news and not stepper.scheduler.sequences:
            return False
        if not self._news:
            self._news.extend(self._step(stepper))
        self._tell()
        return True

    def cancel(self, generation: Generation) -> None:
        """End what is still running of `generation`; those who listen are not called any more."""
        for sequence in generation.sequences:
            self._heard_by.pop(sequence, None)
            if sequence.completion is None and self._stepper is not None:
                self._stepper.cancel(sequence, "generate was interrupted")

    def _tell(self) -> None:
        # What a listener's exception leaves is told at the next step.
        while self._news:
            sequence = self._news.popleft()
            ended = sequence.completion is not None
            generation = self._heard_by.pop(sequence, None) if ended else self._heard_by.get(sequence)
            if generation is not None:
                generation.hear(sequence)

    def stream(
        self,
        prompt: Seq[int] | Session,
        params: SamplingParams | None = None,
        *,
        stream: tuple[int, int] | None = None,
    ) -> Iterator[Piece]:
        """Complete one prompt, yielding each token as it comes; arguments and errors as in `generate`.

        Other calls may run between pieces. Closing the iterator ends the sequence.
        """
        # Complain now, not at the first piece.
        streams = None if stream is None else [stream]
        self._requests.sequences([prompt], params, streams, None, self._open().blocks)
        return self._pieces(prompt, params, streams)

    def _pieces(
        self, prompt: Seq[int] | Session, params: SamplingParams | None, streams: list[tuple[int, int]] | None
    ) -> Iterator[Piece]:
        stepper = self._open()
        sequence = self._requests.sequences([prompt], params, streams, None, stepper.blocks)[0]
        text = TextStream(self._tokenizer, sequence.params.stop)
        num_shown = 0
        stepper.add([sequence])
        try:
            while True:
                while sequence.completion is None and num_shown == len(sequence.logprobs):
                    self.step()
                done = sequence.completion
                if num_shown == len(sequence.logprobs):  # aborted
                    yield Piece(None, math.nan, text.feed(None, last=True), done)
                    return
                token_id = sequence.token_ids[len(sequence.prompt.token_ids) + num_shown]
                logprob = sequence.logprobs[num_shown]
                num_shown += 1
                if done is None or done.finish_reason == "abort" or num_shown < len(sequence.logprobs):
                    yield Piece(token_id, logprob, text.feed(token_id))
                    continue
                shown = text.feed(None if token_id == done.stop else token_id, last=True)
                yield Piece(token_id, logprob, shown, done)
                return
        finally:
            if sequence.completion is None:
                stepper.cancel(sequence, "the reader left")

    def _step(self, stepper: Stepper) -> list[Sequence]:
        try:
            return stepper.step()
        except BaseException as error:
            self._news.extend(stepper.abandon(f"the engine failed: {error!r}"))
            raise

    def reset_cache(self, *, base: bool = True) -> None:
        """Forget every cached prefix in memory; without `base` keep those of the model without its adapter.
        Files in `kv_disk` stay: they say what they hold."""
        stepper = self._open()
        stepper.retire(n for n in stepper.blocks.namespaces() if base or not is_base(n))

    def close(self) -> None:
        """Give the KV memory back, once all blocks are on disk; the engine cannot be used any more."""
        if self._stepper is not None:
            self._stepper.tiers.close()
        self._stepper = None
        self._heard_by.clear()
        self._news.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> Stepper:
        if self._stepper is None:
            raise UnavailableError("This engine is closed; make a new Engine to generate again.")
        return self._stepper
