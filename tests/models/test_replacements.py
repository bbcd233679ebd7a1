"""What `load_model` puts in the place of PyTorch modules, and what it reports when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import save_tiny
from torch import nn
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hetero.errors import ModelError, UnavailableError
from hetero.models import load_model, scoring_batch
from hetero.models.activation import HeteroActivation, activation_kind
from hetero.models.forward import forward_hidden
from hetero.models.linear import HeteroLinear, PackedEmbedding
from hetero.models.load import disable_dropout, pick_device
from hetero.models.norm import HeteroLayerNorm, HeteroRMSNorm, exact_norm

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("module", "offset", "round_first"),
    [
        (LlamaRMSNorm(48, 1e-5), 0.0, True),
        (GptOssRMSNorm(48, 1e-5), 0.0, False),
        (Gemma2RMSNorm(48, 1e-6), 1.0, False),
    ],
)
def test_rms_norms_are_recognised_by_what_they_compute(
    module: nn.Module, offset: float, round_first: bool
) -> None:
    with torch.no_grad():
        module.weight.uniform_(-0.5, 1.5)
    norm = exact_norm(module.bfloat16())
    assert isinstance(norm, HeteroRMSNorm)
    assert (norm.offset, norm.round_first, norm.weight is module.weight) == (offset, round_first, True)
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    differing = (norm(x) != module(x)).float().mean()
    assert float(differing) < 0.02
    torch.testing.assert_close(norm(x), module(x))


def test_other_norms() -> None:
    cohere = CohereLayerNorm(48).bfloat16()
    norm = exact_norm(cohere)
    assert isinstance(norm, HeteroLayerNorm)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(norm(x), cohere(x))
    assert all(torch.equal(norm(x)[i], norm(x[i : i + 1])[0]) for i in range(9))
    assert exact_norm(nn.BatchNorm1d(8)) is None
    assert exact_norm(nn.Linear(4, 4)) is None


class _PoorRMSNorm(nn.Module):
    """Says it is an RMS norm, but takes the mean of absolute values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_name_is_not_enough() -> None:
    assert exact_norm(_PoorRMSNorm()) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("relu", "relu"),
        ("sigmoid", "sigmoid"),
        ("relu2", None),
        ("tanh", None),
    ],
)
def test_activations_are_recognised_by_value(name: str, kind: str | None) -> None:
    assert activation_kind(ACT2FN[name]) == kind


def test_a_tied_head_is_kept_once(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu")
    table, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, PackedEmbedding)
    assert isinstance(lm_head, HeteroLinear)
    assert table.packed is lm_head.packed
    plain = load_model(checkpoint("llama"), device="cpu", dense="torch")
    ids = torch.tensor([[0, 5, 127], [33, 31, 32]])
    assert torch.equal(table(ids), plain.get_input_embeddings()(ids))
    assert table.weight.shape == plain.lm_head.weight.shape


def test_dense_layers_are_packed_and_frozen(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("qwen2_moe"), device="cpu")
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert isinstance(model.model.layers[0].mlp.shared_expert.act_fn, HeteroActivation)
    with pytest.raises(NotImplementedError, match="meta"):
        _ = attention.q_proj.weight + torch.zeros(1).sum().item() * attention.q_proj.weight.cpu()


def test_what_stays_inexact_is_reported(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm", _PoorRMSNorm)
    monkeypatch.setattr(_PoorRMSNorm, "__init__", _poor_init)
    with pytest.warns(UserWarning, match=r"mean in model\.layers\.0\.input_layernorm \(_PoorRMSNorm\)"):
        model = load_model(checkpoint("llama"), device="cpu")
    assert "mean in model.norm (_PoorRMSNorm)" in model.hetero.inexact


def _poor_init(self: nn.Module, size: int, eps: float = 1e-6) -> None:
    nn.Module.__init__(self)
    self.weight = nn.Parameter(torch.ones(size))
    self.eps = eps


def test_dropout_is_switched_off_aloud(checkpoint: Checkpoint) -> None:
    config = AutoConfig.from_pretrained(checkpoint("mixtral"))
    config.attention_dropout = 0.1
    config.router_jitter_noise = 0.01
    with pytest.warns(UserWarning, match=r"attention_dropout=0.1 was set to 0") as seen:
        disable_dropout(config)
    assert len(seen) == 2
    assert config.attention_dropout == config.router_jitter_noise == 0


def test_attention_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_flash_attn", False)
    with pytest.raises(ModelError, match="attends in a way of its own"):
        load_model(save_tiny("llama", tmp_path), device="cpu")


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UnavailableError, match="not supported"):
        pick_device("mps")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="no CUDA device"):
            pick_device("cuda")


def test_odd_token_ids_are_refused(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu")
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 128\)"):
        forward_hidden(model, scoring_batch([[1, 128]]))
