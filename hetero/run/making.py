"""Makes the parts of a run from the sections of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hetero.engine.engine import DISK_SIZE, Engine
from hetero.engine.params import SamplingParams
from hetero.recipe.recipe import Recipe
from hetero.rl.algorithms import ALGORITHMS
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.rewards.spec import RewardSpec
from hetero.rl.rollout import GenerateFn
from hetero.run.opening import Opened
from hetero.run.stopping import Stop
from hetero.train.correction import Correction
from hetero.train.trainer import Trainer


def make_pool(recipe: Recipe, log: Path | None = None) -> RewardPool:
    """The reward processes. Raises RewardError when a function cannot be imported."""
    rl = recipe.rl
    return RewardPool(
        [RewardSpec(**spec.model_dump()) for spec in rl.rewards],
        num_workers=rl.reward_workers,
        timeout=rl.reward_timeout,
        max_failed=rl.max_failed,
        log=log,
    )


def make_engine(recipe: Recipe, loaded: Opened) -> Engine:
    """The engine on the model."""
    section, replay = recipe.engine, recipe.rl.routing_replay
    return Engine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_num_seqs=section.max_num_seqs,
        kv_memory=section.kv_memory,
        kv_ram=section.kv_ram or 0,
        kv_disk=section.kv_disk,
        kv_disk_size=section.kv_disk_size or DISK_SIZE,
        prefill_chunk=section.prefill_chunk,
        seed=recipe.train.seed,
        record_routing=replay == "on" or (replay == "auto" and recipe.rl.max_staleness > 0),
    )


def make_trainer(recipe: Recipe, model: PreTrainedModel) -> Trainer:
    """The trainer on the same model."""
    rl, train = recipe.rl, recipe.train
    loss = ALGORITHMS[rl.algorithm].loss_config(
        max_tokens=rl.max_tokens,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        kl_coef=rl.kl_coef,
        off_policy=rl.max_staleness > 0,
        correction=Correction(rl.correction, rl.correction_low, rl.correction_high),
    )
    return Trainer(
        model,
        lr=train.lr,
        betas=(train.betas[0], train.betas[1]),
        eps=train.eps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        schedule=train.schedule,
        warmup_steps=train.warmup_steps,
        total_steps=train.steps,
        loss=loss.kind,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        kl_coef=loss.kl_coef,
        aggregate=loss.aggregate,
        max_completion_tokens=loss.max_completion_tokens,
        correction=loss.correction,
        temperature=rl.temperature,
        micro_batch_tokens=train.micro_batch_tokens,
        checkpointing=train.checkpointing,
        routing_replay=rl.routing_replay,
    )


def train_sampling(recipe: Recipe, loaded: Opened) -> SamplingParams:
    """How rollouts are sampled: from the full distribution."""
    return SamplingParams(
        temperature=recipe.rl.temperature,
        max_tokens=recipe.rl.max_tokens,
        stop=tuple(recipe.rl.stop),
        stop_ids=loaded.renderer.stop_ids,
        seed=recipe.train.seed,
    )


def eval_sampling(recipe: Recipe, loaded: Opened) -> SamplingParams:
    """How answers to held-out tasks are sampled."""
    section = recipe.eval
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_tokens=section.max_tokens or recipe.rl.max_tokens,
        stop=tuple(recipe.rl.stop),
        stop_ids=loaded.renderer.stop_ids,
        seed=recipe.train.seed,
    )


def stoppable(engine: Engine, stop: Stop) -> GenerateFn:
    """The engine's `generate`, given up at the next token when somebody asks the run to stop."""

    def generate(
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]] | None = None,
        on_finish: Callable[[int, Any], None] | None = None,
    ) -> Any:
        return engine.generate(
            prompts, params, streams=streams, on_finish=on_finish, on_token=lambda index, token: stop.check()
        )

    return generate
