"""THE file to read first: a recipe becomes rollouts, rewards and updates, top to bottom.

One model is in memory. The engine samples from it, the trainer changes its adapter in place, and the next
prompts are sampled under the new version: nothing is copied, merged or sent. With `rl.max_staleness` = n the
answers of a step are begun n updates ahead and finished under the version that they began with, beside those
of the steps around it; what is sampled does not depend on how far each had come when an update was made.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

from hetero.errors import CapacityError, DataError, ModelError, RewardError
from hetero.models.adapter import save_adapter
from hetero.models.lora import adapter_version
from hetero.recipe.recipe import Recipe
from hetero.rl.advantages import assign_advantages
from hetero.rl.algorithms import ALGORITHMS
from hetero.rl.batch import train_samples
from hetero.rl.metrics import completion_rows
from hetero.rl.rolling import Rolling
from hetero.rl.rollout import Rollout
from hetero.run.clock import Clock
from hetero.run.evaluation import evaluate
from hetero.run.metrics import step_record
from hetero.run.parts import Cursor, Parts, prepared
from hetero.run.stopping import StopRequested
from hetero.run.usage import Usage
from hetero.run.watch import Unwatched, Watch
from hetero.train.checkpoint import storing

_log = logging.getLogger(__name__)


def run(recipe: Recipe, out: str | Path, *, resume: bool = False, watch: Watch | None = None) -> int:
    """Train as `recipe` says into the run directory `out`; returns the number of finished steps.

    `resume` goes on from the newest checkpoint, to the same bits that an undisturbed run would have reached.
    On the first SIGTERM or SIGINT, and on errors of data, rewards or logits, the step under way is dropped
    and what is finished is saved.

    Raises:
        DataError, ModelError, RewardError, CapacityError: something that the recipe names cannot be used.
        CheckpointError: `out` exists without `resume`, is in use, or belongs to another recipe.
        StopRequested: a signal came.
    """
    with prepared(recipe, Path(out), resume=resume, watch=watch or Unwatched()) as parts:
        step = restore(parts)
        try:
            measure(parts, step)
            while step < recipe.train.steps:
                step = advance(parts, step + 1)
                measure(parts, step)
        except (StopRequested, RewardError, DataError, ModelError, CapacityError):
            parts.trainer.zero_grad()  # of the step under way
            conclude(parts, step)
            raise
        conclude(parts, step)
        return step


def restore(parts: Parts) -> int:
    """Put trainer and data where the newest checkpoint left them; returns its step, 0 without one."""
    step = parts.folder.saved
    if step:
        parts.trainer.load(parts.folder.trainer(step))
        parts.cursor = Cursor.load(parts.folder.state(step))
        parts.order.load_state_dict(parts.cursor.order)
        parts.versions.extend(parts.cursor.versions)
    return step


def advance(parts: Parts, step: int) -> int:
    """One step: draw tasks, sample answers to each, score them, learn from the comparison, write it down."""
    clock, usage, before = Clock(), Usage(), parts.engine.stats.copy()
    if not parts.begun:
        # So that kv/hit_rate does not tell whether an evaluation ran before in this process: a resumed run
        # writes the same metrics. What the base model computed is nobody's business here, and stays.
        parts.engine.reset_cache(base=False)
    rolled, cursor = roll_out(parts, step)
    clock.add("rollout", rolled.seconds_generate)
    clock.add("reward", rolled.seconds_reward)
    parts.stop.check()
    with clock.part("train"):
        trained = update(parts, step, rolled, clock)
    data = {
        "data/epoch": cursor.order["serial"] / parts.order.num_rows,
        "data/prompts_seen": cursor.order["serial"],
        "data/prompts_too_long": parts.tasks.num_too_long,
    }
    trained["weights/base_hash_ok"] = float(check_base(parts, step))
    seconds = {"time/save": parts.seconds_saving, **clock.metrics(), **usage.metrics()}
    record = step_record(step, rolled, trained, parts.engine.stats - before, seconds, data)
    rows = list(completion_rows(step, rolled.groups))
    parts.folder.completions.write(rows[: parts.recipe.log.completions])
    parts.folder.metrics.write([record])
    parts.cursor = cursor
    parts.watch.stepped(record, rows)
    if step % parts.recipe.train.save_every == 0:
        save(parts, step)
    return step


def roll_out(parts: Parts, step: int) -> tuple[Rollout, Cursor]:
    """Groups of scored answers to the tasks of `step`, and where the run goes on after it.

    The engine has the answers of the next `rl.max_staleness` steps beside them: it fills places that get
    free, and goes on with them while the last rewards are computed.
    """
    parts.watch.phase(step, "rollout")
    started = time.perf_counter()
    begin_ahead(parts, step)
    rolling, order = parts.begun.popleft()
    parts.versions.popleft()

    def progress(done: int, total: int) -> None:
        parts.watch.progress(done, total)
        if done == total:
            parts.watch.phase(step, "reward")

    rolling.report(progress)
    while rolling.pump():
        carry_on(parts)
    generated = time.perf_counter()
    groups = rolling.collect(while_waiting=lambda: carry_on(parts))
    rolled = Rollout(groups, generated - started, time.perf_counter() - generated)
    return rolled, Cursor(order, list(parts.versions))


def begin_ahead(parts: Parts, step: int) -> None:
    """Begin what is not yet begun of `step` and of the next `rl.max_staleness` steps, under the adapter of
    now: the one that is current so many updates before theirs."""
    rl = parts.recipe.rl
    while len(parts.versions) <= rl.max_staleness:
        parts.versions.append(adapter_version(parts.loaded.model))
    last = min(step + rl.max_staleness, parts.recipe.train.steps)
    for number in range(step + len(parts.begun), last + 1):
        draws = parts.order.take(rl.prompts_per_step)
        rolling = Rolling(
            partial(parts.engine.begin, version=parts.versions[number - step]),
            [parts.tasks.train[draw.row] for draw in draws],
            parts.make_environment,
            group_size=rl.group_size,
            sampling=parts.train_sampling,
            pool=parts.pool,
            serials=[draw.serial for draw in draws],
            step=number,
        )
        parts.begun.append((rolling, parts.order.state_dict()))


def carry_on(parts: Parts) -> bool:
    """One token for every sequence in the engine; False when there is none."""
    for rolling, _ in parts.begun:
        rolling.pump()
    parts.stop.check()
    return parts.engine.step()


def update(parts: Parts, step: int, rolled: Rollout, clock: Clock) -> dict[str, float]:
    """Advantages, gradient, optimiser: the adapter is one version further, unless nothing could be learnt."""
    parts.watch.phase(step, "train")
    rl = parts.recipe.rl
    if not assign_advantages(rolled.groups, ALGORITHMS[rl.algorithm].advantage):
        scored = any(t.reward is not None for group in rolled.groups for t in group.trajectories)
        why = "the rewards of every group are all equal" if scored else "no answer has a reward"
        _log.warning("step %d: %s, so there is nothing to learn from it", step, why)
    samples = train_samples(rolled.groups, train_truncated=rl.train_truncated)
    if not samples:
        return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": parts.trainer.schedule(step - 1)}
    with clock.part("backward"):
        seen = parts.trainer.forward_backward(samples)
    with clock.part("optim"):
        return seen | parts.trainer.optim_step()


def check_base(parts: Parts, step: int) -> bool:
    """Whether the base weights are what they were, in the part that this step looks at and those before."""
    whole = parts.base.check()
    if not whole:
        _log.error(
            "step %d: base weights have changed, which nothing may do. The machine's memory or a bug of ours "
            "is at fault: go on from the last checkpoint in a new process, and tell us if it recurs",
            step,
        )
    return whole


def measure(parts: Parts, step: int) -> None:
    """Evaluate before the first step, every `eval.every` steps and after the last, once for each of them."""
    section = parts.recipe.eval
    due = step in (0, parts.recipe.train.steps) or (section.every and step % section.every == 0)
    if not due or not parts.tasks.held_out or any(r["step"] == step for r in parts.folder.eval.read()):
        return
    parts.watch.phase(step, "eval")
    record = evaluate(
        parts.generate,
        parts.tasks.held_out,
        parts.make_environment,
        parts.pool,
        samples=section.samples,
        sampling=parts.eval_sampling,
        correct_from=section.correct_from,
        step=step,
        on_progress=parts.watch.progress,
    )
    parts.folder.eval.write([record])
    parts.watch.evaluated(record)


def save(parts: Parts, step: int) -> None:
    """A checkpoint of the finished `step`, if it has none yet."""
    if step <= parts.folder.saved:
        return
    parts.watch.phase(step, "save")
    clock = Clock()
    train = parts.recipe.train
    parts.folder.save(step, parts.trainer.save, parts.cursor.state(), keep=train.keep_checkpoints)
    parts.seconds_saving = clock.metrics()["time/step"]


def conclude(parts: Parts, step: int) -> None:
    """The end of a run, come to or asked for: the last checkpoint, and the adapter for people to use."""
    save(parts, step)
    with storing(parts.folder.path / "adapter"):
        save_adapter(parts.loaded.model, parts.folder.path / "adapter")
