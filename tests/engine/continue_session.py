"""Continues an exported session in a process of its own.

    python continue_session.py CHECKPOINT SESSION SIZE

SIZE scales the adapter. Prints one JSON object: the tokens and log-probabilities drawn, or the error.
"""

from __future__ import annotations

import json
import sys

import torch

from hetero.engine import Engine, SamplingParams
from hetero.errors import HeteroError
from hetero.models import load_model
from hetero.models.lora import LoraConfig, bump_adapter_version, lora_parameters

MORE = SamplingParams(max_tokens=20, ignore_eos=True)


def load(checkpoint: str, size: float) -> torch.nn.Module:
    model = load_model(checkpoint, device="cpu", lora=LoraConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.copy_(torch.randn(master.shape, generator=generator) * size)
    bump_adapter_version(model)
    return model


if __name__ == "__main__":
    try:
        with Engine(load(sys.argv[1], float(sys.argv[3])), kv_memory="16MiB") as engine:
            session = engine.import_session(sys.argv[2])
            (done,) = engine.generate([session], MORE)
            print(json.dumps([done.token_ids, done.logprobs, done.num_cached_tokens]))
    except HeteroError as error:
        print(json.dumps(str(error)))
