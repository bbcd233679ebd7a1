"""The Transformers quantizer "hetero": packs a model's weights while `from_pretrained` streams them in."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from hetero.errors import ModelError
from hetero.formats import Packing
from hetero.models.config import METHOD, HeteroConfig
from hetero.models.experts import HeteroExperts, replace_experts, replace_module
from hetero.models.linear import HeteroLinear
from hetero.models.mapped_files import own_parameters
from hetero.models.streaming import Pack, owner, pages, streamed

logger = logging.getLogger(__name__)


@register_quantizer(METHOD)
class HeteroQuantizer(HfQuantizer):
    """Carries out a `HeteroConfig`. Checkpoints stay ordinary bf16 ones: packing happens at every load."""

    quantization_config: HeteroConfig
    requires_calibration = False

    def __init__(self, quantization_config: HeteroConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A saved model carries its HeteroConfig, but its tensors are plain: they are packed on the fly all
        # the same.
        self.pre_quantized = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ModelError(
                "hetero packs weights while they load; a device_map with 'disk' would bypass that"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        pages.start()
        experts = replace_experts(model, config.expert_packing())
        dense = config.dense_packing()
        if dense is not None:
            _replace_linears(model, dense)
        if not experts and dense is None:
            logger.warning(
                "%s has no routed experts, so HeteroConfig packs nothing; dense='bf16' packs a dense "
                "model's linears",
                type(model).__name__,
            )
        if experts:
            model.config.get_text_config(decoder=True)._experts_implementation_internal = METHOD

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, child = owner(model, param_name)
        return isinstance(module, HeteroExperts) or (isinstance(module, HeteroLinear) and child == "weight")

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Experts stay in RAM, whatever the device map: they take no room on a GPU."""
        module, _ = owner(model, param_name)
        return 0.0 if isinstance(module, HeteroExperts) else param.element_size()

    def get_quantize_ops(self) -> Pack:
        return Pack()

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        return [streamed(conversion) for conversion in weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, HeteroExperts) and module.store is None:
                lacking = ", ".join(n for n, _ in module.named_parameters(recurse=False))
                raise ModelError(f"the checkpoint lacks {lacking} of {name}")
            if isinstance(module, HeteroLinear) and module.packed is None:
                raise ModelError(f"the checkpoint lacks {name}.weight")

        own_parameters(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights as the checkpoint had them (bf16), so that `save_pretrained` writes an ordinary
        checkpoint."""
        return unpacked_state_dict(model), {}


def _replace_linears(model: PreTrainedModel, packing: Packing) -> None:
    """`HeteroLinear` for every plain linear of the decoder and for an untied head; modules in fp32 are left
    alone."""
    tied = set(model.all_tied_weights_keys)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    for module in [*decoder.modules(), head]:
        if type(module) is nn.Linear and f"{names[id(module)]}.weight" not in tied:
            if module.weight.dtype == torch.float32 and model.dtype != torch.float32:
                continue
            replace_module(model, names[id(module)], HeteroLinear.like(module, packing))


def unpacked_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """State dict with every packed weight unpacked under its original name."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, HeteroLinear) and module.packed is not None:
            state[f"{name}.weight"] = module.packed.unpack()
        elif isinstance(module, HeteroExperts) and module.store is not None:
            state |= {f"{name}.{key}": value for key, value in module.layout.unpack(module.store).items()}
    return state
