"""The peer: plain Transformers (and PEFT for training) on the same checkpoint and the same tokens."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hetero.bench.workload import Measurement, Workload, peak_rss_bytes
from hetero.errors import UnavailableError

try:
    import peft
except ImportError:  # only the "step" case needs it
    HAS_PEFT = False
else:
    HAS_PEFT = True

# PEFT names of every linear that our own default LoRA reaches in Llama-like decoders.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def measure(
    model_dir: str, workload: Workload, *, dtype: str, experts: str, repeats: int, threads: int
) -> Measurement:
    """Time one case on plain Transformers.

    Args:
        dtype: "bfloat16" or "float32".
        experts: Transformers' experts implementation: "eager" or "grouped_mm".
        threads: intra-op threads of PyTorch.
    """
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), experts_implementation=experts
    )
    vocab = model.config.vocab_size
    prompts = torch.tensor(workload.prompts(vocab))
    prefill(model, prompts[:1])  # the first forward pays for lazy set-up
    if workload.case == "step":
        model = with_lora(model, workload.lora_rank)
        ids = torch.cat([prompts, torch.tensor(workload.completions(vocab))], dim=1)
        seconds = [train_step(model, ids, workload) for _ in range(repeats)]
    elif workload.case == "prefill":
        seconds = [prefill(model, prompts) for _ in range(repeats)]
    else:
        seconds = [decode(model, prompts, workload.new_tokens) for _ in range(repeats)]
    return Measurement("transformers", workload.case, min(seconds), workload.num_tokens(), peak_rss_bytes())


def prefill(model: Any, prompts: torch.Tensor) -> float:
    """Seconds of one forward over [B, P] prompts, logits of the last position only."""
    start = time.perf_counter()
    with torch.inference_mode():
        model(prompts, attention_mask=torch.ones_like(prompts), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def decode(model: Any, prompts: torch.Tensor, new_tokens: int) -> float:
    """Seconds to sample `new_tokens` for every row, the prefill's own time taken off."""
    read = prefill(model, prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return max(time.perf_counter() - start - read, 1e-9)


def with_lora(model: Any, rank: int) -> Any:
    """The model with PEFT LoRA on attention, dense MLPs and the fused expert tensors."""
    if not HAS_PEFT:
        raise UnavailableError(
            "the training benchmark compares with PEFT, which is not installed: pip install peft"
        )
    fused = [
        n for n, _ in model.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    suffixes = sorted({".".join(n.split(".")[-2:]) for n in fused})
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(LINEARS), target_parameters=suffixes
    )
    wrapped = peft.get_peft_model(model, config)
    wrapped.gradient_checkpointing_enable()
    wrapped.enable_input_require_grads()
    return wrapped.train()


def train_step(model: Any, ids: torch.Tensor, workload: Workload) -> float:
    """Seconds of forward and backward over [B, P + C] tokens in micro-batches of one group."""
    start = time.perf_counter()
    for chunk in ids.split(workload.group_size):
        logits = model(chunk, logits_to_keep=workload.new_tokens + 1).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), dim=-1)
        picked = logp.gather(2, chunk[:, workload.prompt_tokens :, None])
        (-picked.mean()).backward()
    return time.perf_counter() - start
