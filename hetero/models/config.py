"""`HeteroConfig`: asks Transformers to pack a model's weights into hetero's stores while it loads."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hetero.errors import ModelError, ShapeError
from hetero.formats import Packing, packing

AUTO = "auto"
"""The experts' format that the checkpoint has."""
METHOD = "hetero"
"""The name under which Transformers knows us: quantization method, experts and attention implementation."""


@register_quantization_config(METHOD)
class HeteroConfig(QuantizationConfigMixin):
    """What to pack, and how.

    Args:
        experts: weight format of the experts (a name of `hetero.formats.FORMATS`), or "auto": the codes that
            the checkpoint holds, as they are, and bf16 for plain weights.
        dense: weight format of every dense linear layer of the decoder, or None to leave them to PyTorch.
        group_size, symmetric, scale_search: how the experts' scales are laid out and chosen, see
            `hetero.formats.packing`; None takes the format's own.

    Raises: ModelError for a format that does not exist.
    """

    def __init__(
        self,
        experts: str = AUTO,
        dense: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        scale_search: str = "max",
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.experts = experts
        self.dense = dense
        self.group_size = group_size
        self.symmetric = symmetric
        self.scale_search = scale_search
        try:
            chosen = (self.expert_packing(), self.dense_packing())
        except ShapeError as error:
            raise ModelError(str(error)) from None
        for how in chosen:
            if how is not None and how.format.imported:
                raise ModelError(
                    f"format {how.format.name!r} takes the codes of a GGUF file and cannot be made of bf16 "
                    "weights: 'auto' keeps what such a file holds; or choose int8 or int4"
                )

    def expert_packing(self) -> Packing | None:
        """How to pack the experts; None: as they come."""
        if self.experts == AUTO:
            options = {"group_size": self.group_size, "symmetric": self.symmetric}
            for name, value in options.items():
                if value is not None:
                    raise ShapeError(f"{name}={value} says nothing without a format: experts={AUTO!r}")
            return None
        return packing(self.experts, self.group_size, self.symmetric, self.scale_search)

    def dense_packing(self) -> Packing:
        """How to pack the dense linears."""
        return packing(self.dense or "bf16", scale_search=self.scale_search)
