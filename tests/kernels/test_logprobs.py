from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops, reference
from hetero.kernels.ops import logprobs


@dataclass(frozen=True)
class Case:
    vocab: int = 300
    width: int = 48
    temperature: float = 1.0
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    lora: bool = False


CASES = [
    Case(),
    Case(vocab=1),
    Case(vocab=1025, width=33, temperature=0.7),
    Case(bias=True, logit_scale=0.25, temperature=1.5),
    Case(softcap=3.0),
    Case(softcap=3.0, logit_scale=2.0, bias=True, temperature=0.9, lora=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
TOKENS = 77


class Head:
    """A head on the kernels and the same in fp64."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)

        def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale

        self.case = case
        self.weight = rand(case.vocab, case.width, scale=0.3).bfloat16()
        self.packed = cpu.pack(self.weight)
        self.bias = rand(case.vocab) if case.bias else None
        self.hidden = rand(TOKENS, case.width).bfloat16()
        self.targets = torch.randint(0, case.vocab, (TOKENS,), generator=generator)
        self.lora = None
        if case.lora:
            a, b = rand(4, case.width).requires_grad_(), rand(case.vocab, 4, scale=0.1).requires_grad_()
            self.lora = ops.LoraFactors(a, b, 0.5)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t, V] fp32 as the engine gets them."""
        case = self.case
        return ops.head_logits(hidden, self.packed, self.bias, case.logit_scale, case.softcap, self.lora)

    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        return ops.token_logprobs(
            hidden,
            self.packed,
            targets,
            case.temperature,
            bias=self.bias,
            logit_scale=case.logit_scale,
            softcap=case.softcap,
            lora=self.lora,
        )

    def exact(
        self, hidden: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp64."""
        x = hidden @ self.weight.double().T
        if a is not None and b is not None:
            x = x + 0.5 * (hidden @ a.T) @ b.T
        if self.bias is not None:
            x = x + self.bias
        x = x * self.case.logit_scale
        if self.case.softcap is not None:
            x = self.case.softcap * torch.tanh(x / self.case.softcap)
        return reference.token_logprobs(x, self.targets, self.case.temperature)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / max(want.norm(), 1e-3))


@each_case
def test_values_and_gradients(ctx: cpu.Context, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(case)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * case.vocab * 32)  # chunks of 32 rows and a rest
    factors = [head.lora.a, head.lora.b] if head.lora else []
    narrow = [head.hidden.requires_grad_(), *factors]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    logp, entropy = head.logprobs(head.hidden, head.targets)
    want, want_entropy = head.exact(wide[0], *(wide[1:] or [None, None]))
    assert logp.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    torch.testing.assert_close(logp.double(), want, rtol=0.0, atol=5e-2 if case.lora else 2e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0.0, atol=2e-2 if case.lora else 2e-5)
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1)) * 1e-6
    weights[::7] = 0.0
    grads = torch.autograd.grad((logp * weights).sum(), narrow)
    for grad, true in zip(grads, torch.autograd.grad((want * weights).sum() * 1e6, wide), strict=True):
        assert error(grad * 1e6, true) < 1e-2
    assert (grads[0][::7] == 0.0).all()


@each_case
def test_sampled_and_trained_logprobs_are_equal_bit_for_bit(
    ctx: cpu.Context, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(case)
    temperature = torch.full((TOKENS,), case.temperature)
    keys = torch.arange(4 * TOKENS).reshape(TOKENS, 4)
    plain = (torch.ones(TOKENS), torch.zeros(TOKENS, dtype=torch.int32), torch.zeros(TOKENS))
    ids, logp, raw = ops.sample(head.logits(head.hidden), temperature, *plain, keys)
    assert torch.equal(logp, raw)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * case.vocab * 32)
    assert torch.equal(head.logprobs(head.hidden, ids)[0], logp)
    trained, _ = head.logprobs(head.hidden.detach().requires_grad_(), ids)
    assert torch.equal(trained, logp)
    for r in (0, 40, TOKENS - 1):
        row = slice(r, r + 1)
        alone = ops.sample(
            head.logits(head.hidden[row]), temperature[row], *(t[row] for t in plain), keys[row]
        )
        assert torch.equal(alone[0], ids[row])
        assert torch.equal(alone[1], logp[row])
        with cpu.using(cpu.Context(1, ctx.isa)):
            assert torch.equal(head.logprobs(head.hidden[row], ids[row])[0], logp[row])


def test_temperature_per_token(ctx: cpu.Context) -> None:
    head = Head(Case())
    temperature = torch.linspace(0.5, 2.0, TOKENS)
    got, _ = ops.token_logprobs(head.hidden, head.packed, head.targets, temperature)
    for r in (0, 5, TOKENS - 1):
        one, _ = ops.token_logprobs(
            head.hidden[r : r + 1], head.packed, head.targets[r : r + 1], float(temperature[r])
        )
        assert torch.equal(one[0], got[r])


def test_mistakes_are_named() -> None:
    head = Head(Case())
    with pytest.raises(ShapeError, match=r"expected ids in \[0, 300\)"):
        ops.token_logprobs(head.hidden, head.packed, head.targets + 300)
    with pytest.raises(ShapeError, match="expected positive"):
        ops.token_logprobs(head.hidden, head.packed, head.targets, 0.0)
    with pytest.raises(ShapeError, match=r"targets is \[76\]"):
        ops.token_logprobs(head.hidden, head.packed, head.targets[1:])


def test_no_tokens() -> None:
    head = Head(Case())
    logp, entropy = ops.token_logprobs(head.hidden[:0], head.packed, head.targets[:0])
    assert logp.shape == entropy.shape == (0,)


def test_no_tokens_have_a_gradient_of_nothing() -> None:
    head = Head(CASES[-1])
    hidden = torch.zeros(0, 48, dtype=torch.bfloat16, requires_grad=True)
    assert head.lora is not None
    for lora in (None, head.lora):
        logp, _ = ops.token_logprobs(hidden, head.packed, torch.zeros(0, dtype=torch.long), lora=lora)
        logp.sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.shape == (0, 48)
    assert head.lora.a.grad is not None
    assert not head.lora.a.grad.any()
