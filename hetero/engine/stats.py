"""What the engine did and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made; subtract an earlier `copy()` for one phase.

    Attributes:
        num_steps: forward passes.
        num_finished: sequences handed back, aborted ones included.
        num_aborted: of these, sequences that could not be finished.
        num_dropped: of these, sequences whose adapter version left memory before they ended.
        num_preemptions: times that a running sequence gave its blocks away and was computed again later.
        prefill_tokens: prompt tokens computed, and tokens computed again after a preemption.
        decode_tokens: sampled tokens that were fed back.
        sampled_tokens: tokens drawn.
        cached_tokens: prompt tokens that needed no computing: found in the prefix cache or shared within a
            group.
        prefill_seconds: time in forward passes, the prompt tokens' share.
        decode_seconds: time in forward passes, the share of sampled tokens fed back.
        sample_seconds: LM head and sampling.
        schedule_seconds: everything else in a step.
        stale_refused: lookups in a cache namespace whose weights are gone; 0 unless the engine has a bug.
        ram_stored: blocks copied to the arena (`kv_ram`) when the pool gave them away.
        ram_found, disk_found: prompt tokens that a tier had, when asked.
        ram_in_time, disk_in_time: of these, tokens that came before computing them would have been done, and
            were used.
        ram_faster, disk_faster: of these, tokens whose copying or reading took less time than computing them
            takes.
        disk_written: blocks written to files (`kv_disk`).
        disk_dropped: blocks not written because the disk did not keep up.
        disk_refused: files that were torn, damaged or foreign: removed, and their blocks computed again.
        disk_errors: writes that the disk refused (full, read-only).
    """

    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_dropped: int = 0
    num_preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0
    schedule_seconds: float = 0.0
    stale_refused: int = 0
    ram_stored: int = 0
    ram_found: int = 0
    ram_in_time: int = 0
    ram_faster: int = 0
    disk_found: int = 0
    disk_in_time: int = 0
    disk_faster: int = 0
    disk_written: int = 0
    disk_dropped: int = 0
    disk_refused: int = 0
    disk_errors: int = 0

    @property
    def seconds(self) -> float:
        """Time in steps, all phases."""
        return self.prefill_seconds + self.decode_seconds + self.sample_seconds + self.schedule_seconds

    def copy(self) -> EngineStats:
        """The counts of now."""
        return EngineStats(**asdict(self))

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        return EngineStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def add_forward(self, seconds: float, *, prefill_tokens: int, decode_tokens: int) -> None:
        """Count one forward pass; its time is split by tokens."""
        self.num_steps += 1
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens
        share = prefill_tokens / (prefill_tokens + decode_tokens)
        self.prefill_seconds += seconds * share
        self.decode_seconds += seconds * (1 - share)
