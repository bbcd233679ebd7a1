"""`HeteroConfig`: asks Transformers to pack a model's weights into hetero's stores while it loads."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hetero.errors import ModelError, ShapeError
from hetero.formats import AUTO, Packing, chosen_packing, made, packing

METHOD = "hetero"
"""The name under which Transformers knows us: quantization method, experts and attention implementation."""


@register_quantization_config(METHOD)
class HeteroConfig(QuantizationConfigMixin):
    """What to pack, and how.

    Args:
        experts: weight format of the experts (a name of `hetero.formats.FORMATS`), or "auto": the codes that
            the checkpoint holds, as they are, and bf16 for plain weights.
        dense: weight format of every dense linear layer of the decoder, or None to leave them to PyTorch.
        group_size, symmetric: how the experts' scales are laid out, see `hetero.formats.packing`; None takes
            the format's own.
        scale_search: how all scales are chosen, "max" or "mse".

    Raises: ModelError for a format or a combination that does not exist, and for options that would mean
        nothing.
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
            packings = (self.expert_packing(), self.dense_packing())
        except ShapeError as error:
            raise ModelError(str(error)) from None
        if scale_search != "max" and not any(how is not None and how.group_size for how in packings):
            raise ModelError(
                f"scale_search={scale_search!r} means nothing where no format has scales "
                f"(experts={experts!r}, dense={dense!r}); drop it, or name a format such as 'int4'"
            )

    def expert_packing(self) -> Packing | None:
        """How to pack the experts; None: as they come."""
        return chosen_packing(self.experts, self.group_size, self.symmetric, self.scale_search)

    def dense_packing(self) -> Packing | None:
        """How to pack the dense linears; None: not at all."""
        if self.dense is None:
            return None
        return made(packing(self.dense, scale_search=self.scale_search))
