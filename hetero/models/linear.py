"""Dense linear layers and the tied embedding table over packed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetero.errors import ModelError, ShapeError
from hetero.formats import BF16, Packing
from hetero.kernels import ops
from hetero.kernels.cpu import PackedWeight, pack


class HeteroLinear(nn.Module):
    """y = x W^T + b (+ LoRA) with the exact CPU kernels; the weight is frozen.

    While a checkpoint loads, `weight` is a placeholder parameter on the meta device; once packed it stays as
    a plain meta tensor, so that code which asks for its shape or dtype is answered and code which computes
    with it fails aloud.

    Attributes:
        packed: the weight [N, K]; None until loading has finished.
        packing: how `pack` packs it.
        bias: fp32 parameter [N], or None.
        lora: adapter of this layer, or None.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, packing: Packing = BF16
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.packed: PackedWeight | None = None
        self.packing = packing
        self.lora: ops.LoraFactors | ops.Runs[ops.LoraFactors] | None = None
        weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        self.register_parameter("bias", None)
        if bias:
            placeholder = torch.empty(out_features, dtype=torch.float32, device="meta")
            self.bias = nn.Parameter(placeholder, requires_grad=False)

    @classmethod
    def like(cls, linear: nn.Linear, packing: Packing = BF16) -> HeteroLinear:
        """An empty layer of the shape of `linear`."""
        bias = linear.bias is not None
        return cls(linear.in_features, linear.out_features, bias, linear.weight.dtype, packing)

    def pack(self, weight: Tensor | PackedWeight) -> None:
        """Take the weight [N, K], packing it if it is not. Raises ShapeError."""
        packed = weight
        if not isinstance(packed, PackedWeight):
            packed = pack(packed.to("cpu", torch.bfloat16), packing=self.packing)
        if (packed.e, packed.n, packed.k) != (1, self.out_features, self.in_features):
            want = (self.out_features, self.in_features)
            raise ShapeError(f"weight has shape {(packed.n, packed.k)}, expected {want}")
        self.packed = packed
        placeholder = self._parameters.pop("weight", None)
        if placeholder is not None:
            self.__dict__["weight"] = placeholder.data

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        if self.packed is None:
            raise ModelError("a linear layer has no weight yet: the checkpoint did not hold it")
        return ops.linear(x, self.packed, self.bias, self.lora)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class PackedEmbedding(nn.Module):
    """Token embeddings read from the packed LM head: tied weights are kept once.

    Args:
        packed: [V, H], shared with the head.
        dtype: dtype of the vectors it returns.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = packed.n
        self.embedding_dim = packed.k
        self.packed = packed
        self.dtype = dtype
        # Shape and dtype for whoever asks; computing with it fails aloud.
        self.__dict__["weight"] = torch.empty(packed.n, packed.k, dtype=dtype, device="meta")

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [...] int64 -> [..., H]."""
        if input_ids.numel() and (int(input_ids.min()) < 0 or int(input_ids.max()) >= self.num_embeddings):
            raise ShapeError(
                f"token ids must be in [0, {self.num_embeddings}), got {input_ids.unique().tolist()[:8]}..."
            )
        ids = input_ids.reshape(-1)
        # Panels [N/32][K/2][32][2]: a row's pairs lie one panel line apart.
        panels = self.packed.data.view(-1, -(-self.embedding_dim // 32) * 16, 32, 2)
        rows = panels[ids // 32, :, ids % 32].flatten(1)[:, : self.embedding_dim]
        return rows.to(self.dtype).view(*input_ids.shape, self.embedding_dim)
