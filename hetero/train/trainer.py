"""The trainer: gradients of whole optimizer batches into the adapter's fp32 masters, and exact resuming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.errors import ArgumentError, ModelError, TrainingError
from hetero.models.checkpointing import set_checkpointing
from hetero.models.lora import adapter_version, bump_adapter_version, lora_parameters
from hetero.models.lora_norms import adapter_norms
from hetero.models.versions import retain_version
from hetero.train.batch import MicroBatch, TrainSample, check_token_ids, pack
from hetero.train.columns import SampleColumns, require_logprobs, version_lag
from hetero.train.correction import Correction, correction_metrics
from hetero.train.losses import NO_CORRECTION, Aggregate, LossConfig
from hetero.train.metrics import TokenLog, loss_metrics, mismatch_of, off_policy_of
from hetero.train.microstep import backward, measure
from hetero.train.older import compare_older
from hetero.train.optimizer import AdamW, gradient_norm
from hetero.train.routing import RoutingLog, check_replay, lora_grad_experts, with_replay
from hetero.train.schedule import Schedule
from hetero.train.scoring import score
from hetero.train.selection import select
from hetero.train.state import TrainerState, load_state, save_state

MAX_NONFINITE_STEPS = 3
"""Steps in a row with a gradient that is not finite before optim_step gives up."""


class Trainer:
    """Trains the LoRA adapter of `model`; the base weights are never written.

    `forward_backward` may be called any number of times before `optim_step`: gradients are kept as sums and
    divided once, by the denominator of all calls together, so the update does not depend on how the batch
    was cut (groups must not be split over calls with aggregate "prompt_mean").

    Args:
        model: from load_model(..., lora=...).
        lr, schedule, warmup_steps, total_steps: see Schedule.
        betas, eps, weight_decay: see AdamW. max_grad_norm: bound of the global gradient norm; inf for none.
        loss, clip_low, clip_high, dual_clip, kl_coef, aggregate, max_completion_tokens: see LossConfig.
        correction: for samples of another policy; by default the loss takes its ratio to that policy.
        temperature: of the sampling; log-probabilities are those of logits / temperature.
        micro_batch_tokens: most rows of one forward; shared prompts count once.
        checkpointing: "layer" keeps the input of each layer and recomputes the rest in the backward.
        routing_replay: whether a sample's recorded experts are selected again: "auto" when another version of
            the adapter sampled it, "on", "off".
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        lr: float = 3e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        schedule: str = "constant",
        warmup_steps: int = 0,
        total_steps: int | None = None,
        loss: str = "ppo_clip",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        kl_coef: float = 0.0,
        aggregate: Aggregate = "token_mean",
        max_completion_tokens: int | None = None,
        correction: Correction = NO_CORRECTION,
        temperature: float = 1.0,
        micro_batch_tokens: int = 2048,
        checkpointing: Literal["layer", "none"] = "layer",
        routing_replay: str = "auto",
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ArgumentError(
                f"temperature is {temperature}; train at the positive temperature of the sampling"
            )
        if micro_batch_tokens < 1 or not max_grad_norm > 0:
            raise ArgumentError(
                f"micro_batch_tokens is {micro_batch_tokens} and max_grad_norm {max_grad_norm}; both are > 0"
            )
        if checkpointing not in ("layer", "none"):
            raise ArgumentError(f"checkpointing is {checkpointing!r}; expected 'layer' or 'none'")
        self.routing_replay = check_replay(routing_replay)
        self.model = model
        self.loss = LossConfig(
            kind=loss,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            aggregate=aggregate,
            max_completion_tokens=max_completion_tokens,
            correction=correction,
        )
        self.schedule = Schedule(lr, schedule, warmup_steps, total_steps)
        self.max_grad_norm = max_grad_norm
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.params = lora_parameters(model)
        if not self.params:
            raise ModelError(
                "the model has no adapter to train; load it with load_model(..., lora=LoraConfig(...))"
            )
        set_checkpointing(model, checkpointing == "layer")
        self.optimizer = AdamW(self.params, betas=betas, eps=eps, weight_decay=weight_decay)
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        self.state = TrainerState()
        self._denominator = 0.0
        self._num_calls = self._num_tokens = 0

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add the gradient of the loss of `samples`; returns metrics of these samples.

        When no group has any spread nothing is added, and train/groups_skipped says so; the
        log-probabilities of the first group are compared all the same. Raises DataError, CapacityError; after
        any exception the gradient is zero, that of earlier calls included.
        """
        chosen = select(samples, self.loss)
        if self.loss.uses_ratio:
            require_logprobs(chosen.samples, self.loss.kind)
        version = adapter_version(self.model)
        seen = chosen.samples or chosen.probe
        columns = SampleColumns(seen, chosen.weights, version)
        routed = with_replay(seen, self.routing_replay, version)
        batches = pack(routed, self.micro_batch_tokens, context=self.context)
        log, routing = TokenLog(), RoutingLog()
        try:
            for batch in batches:
                log.add(self._run(batch, columns, routing, train=bool(chosen.samples)))
        except BaseException:
            self.zero_grad()
            raise
        self._denominator += chosen.denominator
        self._num_calls += 1
        trained = batches if chosen.samples else []
        self._num_tokens += sum(batch.num_tokens for batch in trained)
        counters = {
            "train/tokens": float(sum(batch.num_tokens for batch in trained)),
            "train/rows": float(sum(batch.num_rows for batch in trained)),
            "train/target_tokens": float(sum(len(batch.pairs) for batch in trained)),
            "train/micro_batches": float(len(trained)),
        }
        older = compare_older(
            self.model,
            seen,
            max_rows=self.micro_batch_tokens,
            context=self.context,
            temperature=self.temperature,
        )
        metrics = loss_metrics(log, chosen.denominator) | mismatch_of(log, *older) | correction_metrics(log)
        policy = off_policy_of(log) | version_lag(seen, version) | routing.metrics()
        return metrics | policy | chosen.counters | counters

    def _run(
        self, batch: MicroBatch, columns: SampleColumns, routing: RoutingLog, train: bool
    ) -> dict[str, Tensor]:
        check_token_ids(batch, self.model.config.get_text_config(decoder=True).vocab_size)
        if train:
            return backward(self.model, batch, columns, self.loss, self.temperature, routing)
        return measure(self.model, batch, columns, self.temperature)

    def optim_step(self) -> dict[str, float]:
        """Clip and apply the accumulated gradient; the adapter's version rises when the masters changed.

        num_tokens counts the tokens of all trained samples so far, lora/update_ratio is the norm of this
        update over lora/ab_norm; see `adapter_norms`, `lora_grad_experts`.

        Nothing to apply (no group entered, or every token is masked or clipped) or a gradient that is not
        finite leaves masters, moments and version alone and is counted. Raises TrainingError without
        forward_backward before it, or after MAX_NONFINITE_STEPS non-finite gradients in a row.
        """
        if not self._num_calls:
            raise TrainingError(
                "optim_step without forward_backward since the last step: there is no gradient"
            )
        lr = self.schedule(self.state.step)
        norm = gradient_norm(self.params) / self._denominator if self._denominator else 0.0
        touched = lora_grad_experts(self.params) if self._denominator else {}
        self.state.step += 1
        self.state.num_tokens += self._num_tokens
        moved = 0.0
        if not self._denominator or norm == 0.0:
            self.state.empty_steps += 1
        elif not math.isfinite(norm):
            self.state.nonfinite_steps += 1
            self.state.nonfinite_in_a_row += 1
        else:
            self.state.nonfinite_in_a_row = 0
            clip = min(1.0, self.max_grad_norm / (norm + 1e-6))
            retain_version(self.model)
            moved = self.optimizer.step(lr, clip / self._denominator)
            bump_adapter_version(self.model)
        self.zero_grad()
        if self.state.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise TrainingError(
                f"the gradient was not finite in {MAX_NONFINITE_STEPS} steps in a row; the adapter is as "
                "before them. Lower lr or max_grad_norm, and look at the last completions for broken text."
            )
        sizes = adapter_norms(self.model)
        return {
            "num_tokens": float(self.state.num_tokens),
            "grad_norm": norm,
            "learning_rate": lr,
            "optim/updates": float(self.optimizer.updates),
            "optim/empty_steps": float(self.state.empty_steps),
            "optim/nonfinite_steps": float(self.state.nonfinite_steps),
            "weights/adapter_version": float(adapter_version(self.model)),
            **touched,
            **sizes,
            "lora/update_ratio": moved / sizes["lora/ab_norm"] if moved else 0.0,
        }

    def zero_grad(self) -> None:
        """Drop what forward_backward has accumulated since the last step."""
        for param in self.params.values():
            if param.grad is not None:
                param.grad.zero_()
        self._denominator = 0.0
        self._num_calls = self._num_tokens = 0

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the accumulated gradients, divided by the denominator: those of the loss as reported."""
        scale = 1.0 / self._denominator if self._denominator else 0.0
        return {name: param.grad * scale for name, param in self.params.items() if param.grad is not None}

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[list[float]]:
        """Log-probability of every completion token, masked or not; `reference`: under the base model."""
        return score(
            self.model,
            samples,
            max_rows=self.micro_batch_tokens,
            context=self.context,
            temperature=self.temperature,
            reference=reference,
        )

    def save(self, directory: str | Path) -> Path:
        """Write all that resuming needs: masters, moments, counters, random streams, and the older versions
        of the adapter that are kept; atomic, hashed."""
        if self._num_calls:
            raise TrainingError(
                "save between forward_backward and optim_step would lose the gradient; step first"
            )
        return save_state(directory, self.model, self.optimizer, self.state)

    def load(self, directory: str | Path) -> None:
        """Undo of `save`, to the bit. Raises CheckpointError for a damaged or foreign checkpoint."""
        self.state = load_state(directory, self.model, self.optimizer)
        self.zero_grad()
