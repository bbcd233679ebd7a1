"""One step of the engine: schedule, forward, draw, finish."""

from __future__ import annotations

from collections.abc import Iterable, Set
from time import perf_counter
from typing import NamedTuple

import torch

from hetero.engine.batch import BatchBuilder, Step
from hetero.engine.kv_cache import BlockManager
from hetero.engine.runner import Runner
from hetero.engine.sampler import Sampler
from hetero.engine.scheduler import Scheduler
from hetero.engine.sequence import Prompt, Routes, Sequence
from hetero.engine.slots import Slots
from hetero.engine.stats import EngineStats
from hetero.engine.tiers.block_file import root_of
from hetero.engine.tiers.tiers import Tiers
from hetero.kernels.batch import KV_BLOCK


class Ready(NamedTuple):
    """Sequences that draw a token now.

    Attributes:
        sequences: B of them.
        rows: [B], which row of `states` each draws from; several may share one.
        states: [R, H] final hidden states.
        routes: [R], the experts of each row, where they are recorded.
    """

    sequences: list[Sequence]
    rows: list[int]
    states: torch.Tensor
    routes: list[Routes | None]


class Stepper:
    """Carries all live sequences forward, one token each at a time.

    Args:
        runner: the model.
        tiers: where blocks go that the pool has no room for.
        stats: to count in.
        max_num_seqs: sequences that may run at once.
        prefill_chunk: prompt tokens per step.

    Attributes:
        runner, tiers, stats: as given.
        blocks: the KV cache.
        scheduler: of the live sequences.
    """

    def __init__(
        self, runner: Runner, tiers: Tiers, stats: EngineStats, *, max_num_seqs: int, prefill_chunk: int
    ) -> None:
        self.stats = stats
        self.tiers = tiers
        self.runner = runner
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._builder = BatchBuilder(max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
        self._sampler = Sampler(max_num_seqs=max_num_seqs, vocab_size=runner.vocab_size)
        self._resident: Set[str] = set()
        self._start_empty()

    def _start_empty(self) -> None:
        self.tiers.clear()
        self.blocks = BlockManager(self.runner.store, root_of=self._root, spill=self.tiers.spill)
        max_blocks = min(self.blocks.num_blocks, -(-self.runner.context_length // KV_BLOCK))
        self._slots = Slots(max_num_seqs=self._max_num_seqs, max_blocks=max_blocks)
        self.scheduler = Scheduler(self.blocks, self.tiers, self._slots, prefill_chunk=self._prefill_chunk)

    def _root(self, name: str) -> bytes | None:
        """Of a namespace whose blocks other processes may have made."""
        return root_of(self.runner.fingerprint(name)) if self.tiers.on_disk else None

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        for sequence in sequences:
            if sequence.session is not None:
                sequence.session.begin(sequence, sequence.prompt.namespace)
            self.scheduler.add(sequence)

    def retire(self, names: Iterable[str]) -> None:
        """Make everything in some namespaces unfindable."""
        for name in names:
            self.blocks.retire(name)
        self.scheduler.resting.drop_retired()

    def cancel(self, sequence: Sequence, message: str) -> None:
        """End a sequence before its time."""
        self.scheduler.remove(sequence)
        sequence.finish("abort", message=message)
        self.stats.num_finished += 1
        self.stats.num_aborted += 1

    def abandon(self, message: str) -> list[Sequence]:
        """End every live sequence and forget the cache, after an error that may have left it half written."""
        live = self.scheduler.sequences
        for sequence in live:
            sequence.finish("abort", message=message)
            if sequence.session is not None:
                sequence.session.end()
            self.stats.num_finished += 1
            self.stats.num_aborted += 1
        self.scheduler.resting.forget()
        self._start_empty()
        return live

    def step(self) -> list[Sequence]:
        """Run one forward pass and draw; returns the sequences that got a token or ended."""
        cancelled = self._follow_adapter()
        if cancelled and not self.scheduler.sequences:
            return cancelled
        return cancelled + self._step()

    def _follow_adapter(self) -> list[Sequence]:
        """Drop cached prefixes of adapter versions that are gone, and the sequences that began under them."""
        resident = self.runner.resident()
        if resident == self._resident:
            return []
        self._resident = resident
        cancelled = [s for s in self.scheduler.sequences if s.prompt.namespace.name not in resident]
        for sequence in cancelled:
            began, current = sequence.prompt.namespace.name, self.runner.namespace()
            self.cancel(sequence, f"the adapter changed from {began} to {current} while the sequence ran")
        self.stats.num_dropped += len(cancelled)
        self.retire([name for name in self.blocks.namespaces() if name not in resident])
        return cancelled

    @torch.inference_mode()
    def _step(self) -> list[Sequence]:
        began = perf_counter()
        step = self.scheduler.schedule()
        hidden, forward_seconds = self._forward(step)
        self.tiers.commit(self.scheduler.take_filled())
        ready = self._ready(step, hidden)
        draw_began = perf_counter()
        drawn = self._draw(ready) if ready.sequences else ([], [], [])
        draw_seconds = perf_counter() - draw_began
        for i, sequence in enumerate(ready.sequences):
            token_id, logprob, raw_logprob = (column[i] for column in drawn)
            self._append(sequence, int(token_id), logprob, raw_logprob, ready.routes[ready.rows[i]])
        self.stats.num_preemptions += self.scheduler.take_num_preemptions()
        self.stats.stale_refused += self.blocks.take_num_refused()
        self.stats.sample_seconds += draw_seconds
        self.stats.schedule_seconds += perf_counter() - began - forward_seconds - draw_seconds
        return ready.sequences

    def _draw(self, ready: Ready) -> tuple[list[int], list[float], list[float]]:
        names = [""] * len(ready.states)
        for sequence, row in zip(ready.sequences, ready.rows, strict=True):
            names[row] = sequence.prompt.namespace.name
        return self._sampler.draw(ready.sequences, ready.rows, ready.states, names, self.runner.logits)

    def _forward(self, step: Step) -> tuple[torch.Tensor, float]:
        """Final hidden states [T, H] of a step's tokens and the seconds it took; no tokens, no pass."""
        num_prefill, num_decode = step.num_prefill_tokens, len(step.decodes)
        if not num_prefill + num_decode:
            return torch.empty(0), 0.0
        runs = step.group()
        batch = self._builder.build(step, self._slots.tables)
        began = perf_counter()
        hidden = self.runner.forward(*batch, runs)
        seconds = perf_counter() - began
        self.stats.add_forward(seconds, prefill_tokens=num_prefill, decode_tokens=num_decode)
        return hidden, seconds

    def _ready(self, step: Step, hidden: torch.Tensor) -> Ready:
        """The sequences that draw now, and what they draw from."""
        sequences = list(step.decodes)
        picked = list(range(len(sequences)))  # rows of `hidden`
        end = len(sequences)
        for chunk in step.chunks:
            end += chunk.end - chunk.start
            if chunk.last:
                sequences.append(chunk.sequence)
                picked.append(end - 1)
        found = self.runner.routes(picked) if picked else None
        routes: list[Routes | None] = [None] * len(picked) if found is None else list(found)
        row_of: dict[Prompt, int] = {}
        for row, sequence in enumerate(sequences):
            if sequence.prompt.leader is sequence:
                self.stats.cached_tokens += sequence.num_cached_tokens
                self.scheduler.hold(sequence, hidden[picked[row]], routes[row])
                row_of[sequence.prompt] = row
        rows = list(range(len(picked)))
        kept: list[torch.Tensor] = []  # of prompts computed in earlier steps
        for sequence in self.scheduler.fork_waiting():
            prompt = sequence.prompt
            if prompt not in row_of:
                assert prompt.hidden is not None
                row_of[prompt] = len(picked) + len(kept)
                kept.append(prompt.hidden)
                routes.append(prompt.route)
            self.stats.cached_tokens += sequence.num_cached_tokens
            sequences.append(sequence)
            rows.append(row_of[prompt])
        parts = [hidden[torch.tensor(picked)]] if picked else []
        parts += [torch.stack(kept)] if kept else []
        return Ready(sequences, rows, torch.cat(parts) if parts else hidden, routes)

    def _append(
        self, sequence: Sequence, token_id: int, logprob: float, raw_logprob: float, route: Routes | None
    ) -> None:
        if token_id < 0:
            place = len(sequence.token_ids)
            self.cancel(sequence, f"the model's logits at position {place} hold a NaN or an infinity")
            return
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        sequence.raw_logprobs.append(raw_logprob)
        if route is not None:
            sequence.routes.append(route)
        self.stats.sampled_tokens += 1
        stop = sequence.stopper.check(token_id)
        if stop is not None or len(sequence.token_ids) >= sequence.limit:
            self.scheduler.remove(sequence)
            sequence.finish("length" if stop is None else "stop", stop=stop)
            self.stats.num_finished += 1
