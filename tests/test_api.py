"""The names that people build on. Changing one of these lists is a decision, with a line in CHANGELOG.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import hetero
from hetero.cli.app import app
from hetero.engine.stats import EngineStats
from hetero.models.routing_site import RoutingSite
from hetero.recipe.recipe import Recipe
from hetero.recipe.suggest import all_paths
from hetero.rl.rollout import Rollout
from hetero.run.metrics import step_record
from hetero.train.batch import TrainSample
from hetero.train.columns import version_lag
from hetero.train.correction import correction_metrics
from hetero.train.metrics import TokenLog, mismatch_of, off_policy_of
from hetero.train.routing import RoutingLog, lora_grad_experts

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = [
    "Engine",
    "HeteroConfig",
    "LoraConfig",
    "Recipe",
    "SamplingParams",
    "Sandbox",
    "Trainer",
    "load_model",
]

RECIPE_KEYS = """
model.path model.experts model.dense model.group_size model.symmetric model.scale_search model.device
model.threads
lora.rank lora.alpha lora.targets lora.expert_layout lora.expert_rank lora.start_from
engine.max_num_seqs engine.kv_memory engine.kv_ram engine.kv_disk engine.kv_disk_size engine.prefill_chunk
data.train data.eval data.held_out data.options data.limit data.prompt data.rename data.system data.plain
data.template data.chat
rl.rewards rl.algorithm rl.group_size rl.prompts_per_step rl.max_tokens rl.temperature rl.stop rl.clip_low
rl.clip_high rl.kl_coef rl.max_staleness rl.correction rl.correction_low rl.correction_high rl.routing_replay
rl.train_truncated rl.reward_timeout rl.reward_workers rl.max_failed
train.steps train.lr train.betas train.eps train.weight_decay train.max_grad_norm train.schedule
train.warmup_steps train.micro_batch_tokens train.checkpointing train.seed train.save_every
train.keep_checkpoints
eval.every eval.prompts eval.samples eval.temperature eval.top_p eval.top_k eval.min_p eval.max_tokens
eval.correct_from
log.completions log.samples log.report
"""

KV_METRICS = """
hit_rate preemptions stale_refused ram_stored ram_found ram_in_time ram_faster disk_found disk_in_time
disk_faster disk_written disk_dropped disk_refused disk_errors
"""
METRICS = {
    "mismatch": """
    logp_abs_max logp_abs_mean logp_abs_p99 kl_k1 kl_k3 token_mult_prob_error ppl_ratio chi2_token chi2_seq
    ess is_mean is_max is_min prob_pearson bitwise_equal_frac nonfinite tokens
    masked_token_frac masked_seq_frac masked_by_length correction_mean
    """,
    "off_policy": """
    ratio_mean ratio_min ratio_max ess kl_k3 version_lag_mean version_lag_max mixed_version_traj dropped
    """,
    "moe": """
    load_max_over_mean load_entropy experts_touched cpu_expert_frac routing_confidence route_flip_rate
    tokens_with_any_flip
    replayed_tokens topk_margin_p01 lora_grad_experts_frac
    """,
}

SAMPLING = "--temperature --top-p --top-k --min-p --seed"
TIMED = "--repeats --seconds --rotate-gb --svg --json"
MODEL = (
    "MODEL --format --against --peer-dtype --peer-experts --sequences --prompt-tokens --new-tokens --pairs "
    "--repeats --threads --svg --json"
)
COMMANDS = {
    "rl": "RECIPE OVERRIDES --out --resume --dry-run",
    "generate": f"MODEL --prompt --adapter --experts --system --raw --max-tokens {SAMPLING}",
    "chat": f"MODEL --adapter --experts --system --max-tokens {SAMPLING}",
    "eval": "RECIPE OVERRIDES --adapter --json",
    "report": "RUN",
    "doctor": "MODEL --device --threads --json",
    "upcycle": "SOURCE OUT --experts --top-k --architecture --router-std --expert-noise --seed",
    "recipes list": "",
    "recipes show": "RECIPE",
    "recipes validate": "RECIPE OVERRIDES",
    "recipes schema": "",
    "sandbox run": "ARGV --image --timeout --memory --stdin --tier --min-isolation",
    "sandbox shell": "--image --tier --min-isolation",
    "sandbox ls": "--json",
    "sandbox gc": "--image-days --json",
    "sandbox bench": "--json --n --crowd",
    "sandbox doctor": "--json",
    "sandbox audit verify": "JOURNAL",
    "sandbox audit show": "JOURNAL --json",
    "bench machine": "--threads --json",
    "bench moe": "--shape --format --group-size --tokens --threads --isa --backward --recompute "
    "--lora-rank --against --rivals " + TIMED,
    "bench linear": "--shape --format --group-size --tokens --threads --isa --backward --lora-rank --against "
    + TIMED,
    "bench attention": "--shape --tokens --context --threads --isa --backward --against " + TIMED,
    "bench decode": MODEL,
    "bench prefill": MODEL,
    "bench step": MODEL,
}


def test_public_names() -> None:
    assert hetero.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(hetero, name).__name__ == name
    assert set(PUBLIC) <= set(dir(hetero))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="its public names are Engine, "):
        hetero.Enginee  # noqa: B018


def test_import_is_cheap() -> None:
    code = "import sys, hetero; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_version_is_the_package_metadata_s() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    assert found[1] == hetero.__version__


def test_recipe_keys() -> None:
    assert [path for path in all_paths(Recipe) if "." in path] == RECIPE_KEYS.split()


def test_cache_metrics() -> None:
    rolled = Rollout(groups=[], seconds_generate=0.0, seconds_reward=0.0)
    record = step_record(1, rolled, {}, EngineStats(), {"time/train": 0.0}, {})
    assert [name[3:] for name in record if name.startswith("kv/")] == KV_METRICS.split()


def test_metrics() -> None:
    """Names of the families that tell whether sampling and training agree."""
    column, log = torch.zeros(3), TokenLog()
    log.add({"old_logprobs": column, "logprobs": column, "compared": column == 0, "samples": column.long()})
    site, routing = RoutingSite(4), RoutingLog()
    site.margin = torch.tensor([0.1])
    site.saw(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
    routing.add([site])
    gradient = torch.nn.Parameter(torch.ones(2, 3, 4))
    gradient.grad = torch.ones(2, 3, 4)
    found = {
        **mismatch_of(log),
        **correction_metrics(log),
        **off_policy_of(log),
        **version_lag([TrainSample([1], [2], adapter_version=0)], 1),
        **routing.metrics(),
        **lora_grad_experts({"experts.lora_down_a": gradient}),
        **step_record(1, Rollout([], 0.0, 0.0), {}, EngineStats(), {"time/train": 0.0}, {}),
    }
    for family, names in METRICS.items():
        assert {name for name in found if name.startswith(f"{family}/")} == {
            f"{family}/{name}" for name in names.split()
        }


def test_commands() -> None:
    found: dict[str, str] = {}

    def walk(command: Any, name: str) -> None:
        for child, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {child}".strip())
        if not hasattr(command, "commands"):
            found[name] = " ".join(map(parameter, command.params))

    def parameter(param: Any) -> str:
        return max(param.opts, key=len) if param.param_type_name == "option" else param.name.upper()

    walk(typer.main.get_command(app), "")
    for name, parameters in COMMANDS.items():
        assert found[name] == parameters, name
