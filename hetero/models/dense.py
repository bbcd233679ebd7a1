"""Write a dense checkpoint as a Transformers directory, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero.models.shards import ShardWriter
from hetero.models.source import open_source
from hetero.models.staging import staged_directory


def save_dense(source: str | Path, out_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Convert `source` (a `.gguf` file, a Transformers directory or a Hub id) to a checkpoint in `dtype`.

    Raises:
        ModelError: the source cannot be read, or `out_dir` exists and is not empty.
    """
    dense = open_source(source)
    out_dir = Path(out_dir)
    with staged_directory(out_dir) as staging:
        writer = ShardWriter(staging)
        for name in dense.names():
            writer.add(name, dense.tensor(name).to(dtype))
        writer.finish()
        dense.config.dtype = dtype
        dense.config.save_pretrained(staging)
        dense.save_tokenizer(staging)
    return out_dir
