"""Experts recorded and selected again: exactly those, with weights and gradients of now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.errors import ModelError
from hetero.models import LoraConfig, forward_hidden, head, load_model, lora_parameters, scoring_batch
from hetero.models.routing import routes_of, routing_sites, watched_routing
from hetero.models.routing_site import RoutingSite

TEXTS = [[3, 4, 5, 6, 7, 8], list(range(9, 40)), [50]]
NUM_ROWS = sum(map(len, TEXTS))
FAMILIES = {"mixtral": (4, 2), "qwen3_moe": (6, 2), "gpt_oss": (4, 2), "deepseek_v3": (8, 3), "olmoe": (6, 2)}


def load(directory: Path, **kwargs: Any) -> PreTrainedModel:
    return load_model(directory, device="cpu", lora=LoraConfig(rank=3, alpha=6.0), **kwargs)


def move(model: PreTrainedModel, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(torch.randn(master.shape, generator=generator) * size)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return head(model).logits(forward_hidden(model, scoring_batch(TEXTS)))


def routes(model: PreTrainedModel) -> Tensor:
    """[T, layers, top_k] as the model routes now."""
    with watched_routing(model) as sites, torch.no_grad():
        forward_hidden(model, scoring_batch(TEXTS))
        found = routes_of(model, [s.ids for s in sites if s.ids is not None], range(NUM_ROWS))
    assert found is not None
    assert found.dtype == np.uint8
    return torch.from_numpy(found.astype(np.int16))


@pytest.mark.parametrize("dense", ["bf16", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_recorded_is_selected_again(
    family: str, dense: str, checkpoint: Callable[[str], Path]
) -> None:
    num_experts, top_k = FAMILIES[family]
    model = load(checkpoint(family), dense=dense)
    before, plain = routes(model), logits(model)
    layers = len(routing_sites(model))
    assert before.shape == (NUM_ROWS, layers, top_k)
    assert 0 <= int(before.min()) < int(before.max()) < num_experts
    with watched_routing(model, before, replay=True) as sites:
        assert torch.equal(logits(model), plain), "the same version selects the same: no bit changes"
        assert all(torch.equal(site.live, before[:, i].long()) for i, site in enumerate(sites))
    move(model)
    live, moved = routes(model), logits(model)
    assert not torch.equal(live, before), "the adapter is to change the routing"
    before[5:9] = -1  # rows without a record route as they like
    with watched_routing(model, before, replay=True) as sites:
        replayed = logits(model)
        for number, site in enumerate(sites):
            known = before[:, number, 0] >= 0
            assert torch.equal(site.ids[known], before[known, number].long())
            assert torch.equal(site.ids[~known], site.live[~known])
    assert not torch.equal(replayed, moved)
    assert torch.equal(logits(model), moved), "nothing is left behind"
    with watched_routing(model, before) as sites:
        assert torch.equal(logits(model), moved), "only compared"
        assert all(torch.equal(site.ids, site.live) for site in sites)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_independent_in_a_replay(family: str, checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint(family))
    recorded = routes(model)
    move(model)
    with watched_routing(model, recorded, replay=True), torch.no_grad():
        whole = forward_hidden(model, scoring_batch(TEXTS))
    first = len(TEXTS[0])
    with watched_routing(model, recorded[:first], replay=True), torch.no_grad():
        assert torch.equal(forward_hidden(model, scoring_batch(TEXTS[:1])), whole[:first])


def test_gradients_flow_through_the_weights_of_replayed_experts(checkpoint: Callable[[str], Path]) -> None:
    """The router's input gets the gradient of the weights that it gives to the recorded experts."""
    model = load(checkpoint("qwen3_moe"), dense="torch", dtype=torch.float32)
    recorded = routes(model)
    recorded[:, :, 1] = (recorded[:, :, 0] + 3) % 6  # not what any router would choose
    router = next(m for n, m in model.named_modules() if n.endswith("layers.1.mlp.gate"))
    seen: list[Tensor] = []
    router.register_forward_pre_hook(lambda module, args: (seen.append(args[0]), args[0].retain_grad())[1])
    scores: list[tuple[Tensor, Tensor]] = []
    router.register_forward_hook(lambda module, args, out: scores.append((out[1], out[2])))
    move(model, 0.1)
    with watched_routing(model, recorded, replay=True):
        forward_hidden(model, scoring_batch(TEXTS)).square().mean().backward()
    weights, ids = scores[0]
    assert torch.equal(ids, recorded[:, 1].long())
    with torch.no_grad():
        probs = (seen[0].reshape(NUM_ROWS, -1) @ router.weight.T).float().softmax(-1)
        expected = probs.gather(1, ids)
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.detach().float(), expected)
    assert seen[0].grad is not None
    assert float(seen[0].grad.abs().min(dim=-1).values.max()) > 0


def test_a_gradient_of_a_replay_is_that_of_finite_differences(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("mixtral"), dense="torch", dtype=torch.float32)
    recorded = routes(model)
    move(model, 0.1)
    name = next(name for name in lora_parameters(model) if "layers.0.self_attn.v_proj" in name)
    master = lora_parameters(model)[name]

    def loss() -> Tensor:
        with watched_routing(model, recorded, replay=True):
            return forward_hidden(model, scoring_batch(TEXTS)).float().square().mean()

    loss().backward()
    assert master.grad is not None
    direction = master.grad / master.grad.norm()
    step = 0.05
    with torch.no_grad():
        master += step * direction
        above = loss()
        master -= 2 * step * direction
        below = loss()
        master += step * direction
    slope = float(above - below) / (2 * step)
    assert slope == pytest.approx(float(master.grad.norm()), rel=0.1)


def test_what_cannot_be_replayed_is_an_error(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("mixtral"))
    recorded = routes(model)
    with (
        pytest.raises(ModelError, match="recorded in 1 layers, but the model has 2"),
        watched_routing(model, recorded[:, :1], replay=True),
    ):
        pass
    block = model.get_submodule("model.layers.1.mlp")
    forward = block.forward.__wrapped__  # as if this block selected in a way of its own
    block.forward = forward
    move(model)
    with pytest.raises(ModelError, match="cannot be replayed"), watched_routing(model, recorded, replay=True):
        logits(model)
    assert not any(site.watched for site in routing_sites(model))


@pytest.mark.parametrize("dense", ["bf16", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_margin_of_a_selection_is_that_of_its_scores(
    family: str, dense: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_experts, top_k = FAMILIES[family]
    model = load(checkpoint(family), dense=dense)
    plain, seen = logits(model), []
    select = RoutingSite.select

    def spy(site: RoutingSite, scores: Tensor, k: int, topk: Any) -> Any:
        if (scores.shape[-1], k) == (num_experts, top_k):
            seen.append(scores.detach().reshape(-1, num_experts).float())
        return select(site, scores, k, topk)

    monkeypatch.setattr(RoutingSite, "select", spy)
    with watched_routing(model, measure=True) as sites:
        assert torch.equal(logits(model), plain), "looking on changes nothing"
        margins = [site.margin for site in sites]
    assert len(seen) == len(margins) == len(routing_sites(model))
    for scores, margin in zip(seen, margins, strict=True):
        ordered = scores.sort(-1, descending=True).values
        assert margin is not None
        assert torch.equal(margin.float(), ordered[:, top_k - 1] - ordered[:, top_k])
        assert float(margin.max()) > 0.0
