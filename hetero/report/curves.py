"""Which charts a report has, and from which metrics."""

from __future__ import annotations

from collections.abc import Iterator

from hetero.report.charts import Series, bar_chart, line_chart
from hetero.report.numbers import short, time_parts
from hetero.report.run_files import Run, points


def curves(run: Run) -> list[str]:
    """The figures that the run has data for, the most telling first."""
    return [figure for figure in _all(run) if figure]


def _all(run: Run) -> Iterator[str]:
    yield _reward(run)
    accuracy = Series("accuracy", points(run.evaluations, "accuracy"), dots=True)
    yield line_chart("Held-out accuracy", [accuracy], low=0.0, high=1.0, note=_ACCURACY_NOTE, wide=True)
    yield from _rewards_of_functions(run)
    yield line_chart("Loss", [Series("loss", run.series("loss"), noisy=True)], note=_LOSS_NOTE)
    yield line_chart(
        "Gradient norm", [Series("norm before clipping", run.series("grad_norm"), noisy=True)], low=0.0
    )
    yield line_chart("Entropy", [Series("nats per token", run.series("entropy"), noisy=True)], low=0.0)
    yield _lengths(run)
    yield line_chart(
        "Groups without a signal",
        [Series("all rewards equal", run.series("frac_reward_zero_std"))],
        low=0.0,
        high=1.0,
        note="Share of groups whose answers all got the same reward: nothing is learnt from them.",
    )
    yield _mismatch(run)
    change = [
        Series("clipped, low", run.series("clip_ratio/low_mean")),
        Series("clipped, high", run.series("clip_ratio/high_mean")),
        Series("KL to the sampling policy", run.series("approx_kl")),
    ]
    if any(value for one in change for _, value in one.points):  # all 0 as long as a batch is used once
        yield line_chart("Policy change", change, low=0.0)
    yield _staleness(run)
    yield _masked(run)
    yield _experts(run)
    sizes = [Series("of B A, what is added to the base", run.series("lora/delta_norm"))]
    yield line_chart("Size of the adapter", sizes, low=0.0, note="Frobenius norm. It moves at every update.")
    yield line_chart("KL to the base model", [Series("k3 per token", run.series("kl"), noisy=True)], low=0.0)
    rates = run.series("learning_rate")
    if len({rate for _, rate in rates}) > 1:
        yield line_chart("Learning rate", [Series("learning rate", rates)], low=0.0)
    yield bar_chart(
        "Time per step", _times(run), unit=" s", note="Rewards are computed while answers are still written."
    )
    yield line_chart(
        "Tokens per second",
        [
            Series("rollout", run.series("perf/rollout_tok_s")),
            Series("train", run.series("perf/train_tok_s")),
        ],
        low=0.0,
    )


_ACCURACY_NOTE = "Share of right answers to tasks that never occur in training."
_LOSS_NOTE = "Near 0 while the policy is the one that sampled; its gradient is what counts, not its value."


def _reward(run: Run) -> str:
    spread = dict(run.series("reward_std"))
    rewards = run.series("reward")
    band = [(step, value - spread[step], value + spread[step]) for step, value in rewards if step in spread]
    unit = all(0 <= value <= 1 for _, value in rewards)
    limits = (0.0, 1.0) if unit else (None, None)
    if unit:
        band = [(step, max(low, 0.0), min(high, 1.0)) for step, low, high in band]
    return line_chart(
        "Reward",
        [Series("mean of the step", rewards, noisy=True, band=band)],
        low=limits[0],
        high=limits[1],
        note="Shaded: one standard deviation within a group." if band else "",
        wide=True,
    )


def _rewards_of_functions(run: Run) -> Iterator[str]:
    names = dict.fromkeys(
        name
        for record in run.metrics
        for name in record
        if name.startswith("rewards/") and name.endswith("/mean")
    )
    if len(names) > 1:
        lines = [
            Series(name.removeprefix("rewards/").removesuffix("/mean"), run.series(name)) for name in names
        ]
        yield line_chart("Reward functions", lines, note="Unweighted, where each applies.")


def _lengths(run: Run) -> str:
    low, high = dict(run.series("completions/min_length")), dict(run.series("completions/max_length"))
    mean = run.series("completions/mean_length")
    band = [(step, low[step], high[step]) for step, _ in mean if step in low and step in high]
    limit = run.setting("rl.max_tokens")
    note = (
        f"Shaded: shortest to longest. The limit is {limit} tokens."
        if limit
        else "Shaded: shortest to longest."
    )
    return line_chart("Length of answers, tokens", [Series("mean", mean, band=band)], low=0.0, note=note)


def _mismatch(run: Run) -> str:
    largest = run.series("mismatch/logp_abs_max")
    if not largest:
        return ""
    worst = max(value for _, value in largest)
    if worst == 0:
        note = "Exactly 0: sampler and trainer agree on every log-probability, bit for bit."
    else:
        note = f"Largest difference of a token's log-probability between sampler and trainer: {short(worst)}."
    lines = [Series("largest |Δ log p|", largest), Series("mean", run.series("mismatch/logp_abs_mean"))]
    return line_chart(
        "Mismatch of sampler and trainer", lines, low=0.0, high=1e-3 if worst == 0 else None, note=note
    )


def _staleness(run: Run) -> str:
    lags = run.series("off_policy/version_lag_max")
    if not any(lag for _, lag in lags):
        return ""
    lines = [
        Series("effective sample size", run.series("off_policy/ess")),
        Series("smallest ratio", run.series("off_policy/ratio_min")),
        Series("largest ratio", run.series("off_policy/ratio_max")),
    ]
    most = max(lag for _, lag in lags)
    note = (
        f"Answers are sampled up to {short(most)} updates before they are trained. Ratio of a token's "
        "probabilities now and then; the effective sample size is 1 when all ratios are."
    )
    return line_chart("Distance from the sampling policy", lines, low=0.0, note=note)


def _masked(run: Run) -> str:
    tokens = run.series("mismatch/masked_token_frac")
    if not any(value for _, value in tokens):
        return ""
    lines = [
        Series("tokens", tokens),
        Series("whole answers", run.series("mismatch/masked_seq_frac")),
        Series("longer half against all", run.series("mismatch/masked_by_length")),
    ]
    note = "Share that the correction took out of the loss. Last line over 1: long answers suffer more."
    return line_chart("Masked by the correction", lines, low=0.0, note=note)


def _experts(run: Run) -> str:
    lines = [
        Series("busiest expert over mean load", run.series("moe/load_max_over_mean")),
        Series("share of experts used", run.series("moe/experts_touched")),
    ]
    flips = run.series("moe/route_flip_rate")
    if any(value for _, value in flips):
        lines.append(Series("routes that changed since sampling", flips))
    return line_chart("Experts", lines, low=0.0, note="Rows of training, mean over layers.")


def _times(run: Run) -> list[Series]:
    """The parts of every step."""
    steps = [(float(record["step"]), time_parts(record)) for record in run.metrics if "time/step" in record]
    names = list(time_parts({}))
    return [Series(name, [(step, parts[name]) for step, parts in steps]) for name in names]
