"""The exactness table: the same tokens, computed in every way that a run computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero.doctor.finding import Finding
from hetero.doctor.subject import Subject
from hetero.engine.sequence import Completion
from hetero.kernels.cpu import Context, context, using
from hetero.train.trainer import Trainer

_WRONG = (
    "Rollout and training disagree on this model, so that ratios and KL are wrong by that much. Please "
    "report it with the output of `hetero doctor --json`; until then "
)
_ROWS = 4096


def check_exactness(subject: Subject) -> Iterator[Finding]:
    """max |delta logp| against the first rollout; 0 is promised where dense parts run on the CPU kernels."""
    with subject.engine() as engine:
        first = subject.ask(engine)
        shared = engine.stats.cached_tokens  # by equal prompts of one call
        yield subject.compare(
            "exact/prefix_reuse",
            [(first, subject.ask(engine))],
            _WRONG + "give every engine.generate call a fresh cache: engine.reset_cache().",
        )
        if engine.stats.cached_tokens <= 2 * shared:
            yield Finding(
                "exact/prefix_reuse", False, "nothing was reused", _WRONG + "raise engine.kv_memory."
            )
    yield _prefill(subject, first)
    yield _settings(
        subject, first, "exact/chunked_prefill", {"prefill_chunk": 13}, "raise engine.prefill_chunk."
    )
    yield _settings(subject, first, "exact/batch", {"max_num_seqs": 1}, "keep engine.max_num_seqs fixed.")
    yield _training(subject, first)
    yield subject.compare(
        "exact/packed_training",
        [(first, subject.scores(first, rows)) for rows in (1, _ROWS)],
        _WRONG + "set train.micro_batch_tokens to 1.",
    )
    yield _threads(subject, first)


def _settings(
    subject: Subject, first: list[Completion], check: str, settings: dict[str, int], advice: str
) -> Finding:
    with subject.engine(**settings) as engine:
        return subject.compare(check, [(first, subject.ask(engine))], _WRONG + advice)


def _prefill(subject: Subject, first: list[Completion]) -> Finding:
    """The last token again, as the first one after a prompt that holds all others."""
    prompts = [p + c.token_ids[:-1] for p, c in zip(subject.prompts, first, strict=True)]
    last = [replace(c, token_ids=c.token_ids[-1:], logprobs=c.logprobs[-1:]) for c in first]
    with subject.engine() as engine:
        again = subject.ask(engine, prompts, max_tokens=1)
    return subject.compare(
        "exact/decode_and_prefill", [(last, again)], _WRONG + "do not train on this model."
    )


def _training(subject: Subject, first: list[Completion]) -> Finding:
    """The forward of a training step, with gradients, by the metric that a run writes down."""
    trainer = Trainer(subject.model, micro_batch_tokens=_ROWS)
    try:
        metrics = trainer.forward_backward(subject.samples(first))
    finally:
        trainer.zero_grad()
    gap = metrics["mismatch/logp_abs_max" if subject.exact else "mismatch/logp_abs_mean"]
    return subject.judge("exact/training", [gap], _WRONG + "do not train on this model.")


def _threads(subject: Subject, first: list[Completion]) -> Finding:
    pairs = []
    for threads in sorted({1, 2, 3, context().threads}):
        with using(Context(threads=threads)), subject.engine() as engine:
            pairs += [(first, subject.ask(engine)), (first, subject.scores(first, _ROWS))]
    return subject.compare("exact/threads", pairs, _WRONG + "set model.threads to 1.")
