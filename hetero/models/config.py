"""`HeteroConfig`: asks Transformers to pack a model's weights into hetero's stores while it loads."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hetero.errors import ModelError
from hetero.formats import FORMATS

METHOD = "hetero"
"""The name under which Transformers knows us: quantization method, experts and attention implementation."""


@register_quantization_config(METHOD)
class HeteroConfig(QuantizationConfigMixin):
    """What to pack, and how.

    Args:
        experts: weight format of the experts (a name of `hetero.formats.FORMATS`).
        dense: weight format of every dense linear layer of the decoder, or None to leave them to PyTorch.
        group_size: weights per scale, for formats that have scales; None takes the format's own.

    Raises: ModelError for a format that does not exist.
    """

    def __init__(
        self, experts: str = "bf16", dense: str | None = None, group_size: int | None = None, **kwargs: Any
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        for what, value in (("experts", experts), ("dense", dense)):
            if value is not None and value not in FORMATS:
                raise ModelError(f"{what}={value!r} is not a weight format; hetero has {', '.join(FORMATS)}")
        self.experts = experts
        self.dense = dense
        self.group_size = group_size
