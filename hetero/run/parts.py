"""Everything that a run holds while it goes, opened in order and closed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hetero.data.order import EpochOrder
from hetero.engine.engine import Engine
from hetero.engine.params import SamplingParams
from hetero.models.base_watch import BaseWatch
from hetero.models.versions import keep_versions
from hetero.recipe.recipe import Recipe
from hetero.rl.environment import EnvironmentFactory, SingleTurn
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.rolling import Rolling
from hetero.rl.rollout import GenerateFn
from hetero.run.directory import RunDirectory
from hetero.run.making import eval_sampling, make_engine, make_pool, make_trainer, stoppable, train_sampling
from hetero.run.opening import Opened, opened, prepare_adapter
from hetero.run.stopping import Stop, stop_signals
from hetero.run.tasks import RunTasks, load_tasks
from hetero.run.watch import Watch
from hetero.train.random_state import seed_random_state
from hetero.train.trainer import Trainer


@dataclass(frozen=True)
class Cursor:
    """Where a run goes on after a step.

    Attributes:
        order: state of the order of the tasks after that step's draws.
        versions: of the adapter, under which the next `rl.max_staleness` steps are sampled.
    """

    order: dict[str, Any]
    versions: list[int]

    def state(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    @classmethod
    def load(cls, state: dict[str, Any]) -> Cursor:
        """What `state` gave; checkpoints of before there were versions have none."""
        return cls(state["order"], state.get("versions", []))


@dataclass
class Parts:
    """The parts of a run.

    Attributes:
        cursor: after the last finished step.
        base: of the weights that nobody writes to.
        versions: of the adapter, under which the coming steps are sampled, so far as that is decided.
        begun: the coming steps whose sampling has begun, in order, each with the state of the order of the
            tasks after its draws.
        seconds_saving: what the last checkpoint took.
    """

    recipe: Recipe
    folder: RunDirectory
    watch: Watch
    stop: Stop
    tasks: RunTasks
    order: EpochOrder
    pool: RewardPool
    loaded: Opened
    engine: Engine
    trainer: Trainer
    generate: GenerateFn
    make_environment: EnvironmentFactory
    train_sampling: SamplingParams
    eval_sampling: SamplingParams
    cursor: Cursor
    base: BaseWatch
    versions: deque[int] = field(default_factory=deque)
    begun: deque[tuple[Rolling, dict[str, Any]]] = field(default_factory=deque)
    seconds_saving: float = 0.0


@contextmanager
def prepared(recipe: Recipe, out: Path, *, resume: bool, watch: Watch) -> Iterator[Parts]:
    """Open directory, data, rewards and model, what fails cheapest first; close them at the end.

    Reward processes start before the model is there, and with them their launchers of sandboxes: nothing is
    forked from a large process, and a machine without sandboxes is told so at once.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        folder = stack.enter_context(closing(RunDirectory.open(out, recipe, resume=resume)))
        watch.started(recipe, folder.path, folder.saved)
        stack.callback(watch.ended)
        watch.phase(folder.saved, "load")
        tasks = load_tasks(recipe.data, recipe.eval.prompts)
        pool = stack.enter_context(make_pool(recipe, folder.path / "rewards.log"))
        pool.check_columns(tasks.columns)
        seed_random_state(recipe.train.seed)
        loaded = stack.enter_context(
            opened(recipe.model, chat=recipe.data.chat, template=recipe.data.template)
        )
        prepare_adapter(loaded.model, recipe.lora, recipe.train.seed)
        keep_versions(loaded.model, recipe.rl.max_staleness + 1)
        engine = stack.enter_context(make_engine(recipe, loaded))
        trainer = make_trainer(recipe, loaded.model)
        max_tokens = recipe.rl.max_tokens
        tasks = tasks.fit(loaded.renderer, trainer.context, max_tokens, recipe.eval.max_tokens or max_tokens)
        stop.check()
        order = EpochOrder(len(tasks.train), recipe.train.seed)
        yield Parts(
            recipe=recipe,
            folder=folder,
            watch=watch,
            stop=stop,
            tasks=tasks,
            order=order,
            pool=pool,
            loaded=loaded,
            engine=engine,
            trainer=trainer,
            generate=stoppable(engine, stop),
            make_environment=partial(SingleTurn, loaded.renderer, pool),
            train_sampling=train_sampling(recipe, loaded),
            eval_sampling=eval_sampling(recipe, loaded),
            cursor=Cursor(order.state_dict(), []),
            base=BaseWatch(loaded.model),
        )
