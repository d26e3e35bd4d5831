"""The LoRA layers of a torchtune decoder: what is trained, its initial values, and the merged weights.

"LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., arXiv 2106.09685): a frozen weight W becomes W + alpha / rank * B A.
"DoRA: Weight-Decomposed Low-Rank Adaptation" (Liu et al., arXiv 2402.09353) then gives each row a trained norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchtune.modules.peft import LORA_ATTN_MODULES, DoRALinear, LoRALinear

from finch.base.dtensor import full_tensor, load_full_tensor
from finch.base.errors import UserError

ATTENTION_MODULES: tuple[str, ...] = get_args(LORA_ATTN_MODULES)
AdapterLayer: TypeAlias = LoRALinear | DoRALinear


def check_attention_modules(names: Any) -> None:
    """Checks ``lora_attn_modules``; torchtune's own builders ignore an unknown name. Raises UserError if it is not a list, or has an
    unknown name."""
    known = ", ".join(ATTENTION_MODULES)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UserError(f"model.lora_attn_modules={names} must be a list of names of {known}")
    unknown = [str(name) for name in names if name not in ATTENTION_MODULES]
    if unknown:
        raise UserError(f"model.lora_attn_modules names {', '.join(unknown)}; torchtune's names are {known}")


def check_lora_settings(block: Mapping[str, Any]) -> None:
    """Checks a config's ``model:`` block before the model is built from it. Raises UserError if ``lora_attn_modules`` is wrong, or the base
    is in four bits (QLoRA)."""
    if "lora_attn_modules" in block:
        check_attention_modules(block["lora_attn_modules"])
    component = str(block.get("_component_"))
    if block.get("quantize_base"):
        raise UserError(
            "model.quantize_base=True (QLoRA) is not supported: a base in four bits can be neither sharded nor merged here; set it to False"
        )
    if component.rpartition(".")[2].startswith("qlora_"):
        raise UserError(
            f"model._component_={component} (QLoRA) is not supported: a base in four bits can be neither sharded nor merged here; give {component.replace('.qlora_', '.lora_')}"
        )


def train_adapters_only(decoder: nn.Module, component: str) -> None:
    """Freezes every parameter but the adapters'; before the decoder is sharded. Raises UserError if there are none; ``component`` is the
    dotted path of the decoder's builder."""
    trained = {id(parameter) for parameter in adapter_parameters(decoder).values()}
    for parameter in decoder.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    if trained:
        return
    module, _, name = component.rpartition(".")
    if "lora" in name:
        raise UserError(
            f"model._component_={component} puts LoRA on no layer; set model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj] and apply_lora_to_mlp=True"
        )
    raise UserError(
        f"model._component_={component} builds no LoRA layers; give the builder that does, such as {module}.lora_{name}, with lora_attn_modules, lora_rank and lora_alpha"
    )


def adapter_layers(decoder: nn.Module) -> dict[str, AdapterLayer]:
    """The decoder's LoRA and DoRA layers by name, in the decoder's order.

    Names are those of the decoder's state dict, whether or not its layers are checkpointed.
    """
    return {
        name.replace(_CHECKPOINT_PREFIX, ""): module
        for name, module in decoder.named_modules()
        if isinstance(module, AdapterLayer)
    }


def adapter_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that LoRA trains, by name. Sharding replaces parameters: ask for them after it."""
    return {
        f"{name}.{part}": layer.get_parameter(part)
        for name, layer in adapter_layers(decoder).items()
        for part in layer.adapter_params()
    }


def scaling(layer: AdapterLayer) -> float:
    """alpha / rank."""
    return layer.scaling if isinstance(layer, DoRALinear) else layer.alpha / layer.rank


def initialize_adapters(decoder: nn.Module, seed: int) -> None:
    """Initial values that leave the pretrained model unchanged: A uniform within 1 / sqrt(in_dim) as in torchtune, B zero, magnitudes the rows' norms.

    Call it after the base weights have been loaded, since magnitudes need them. Each A is drawn unsharded, by its own
    generator: it has the same values on any number of ranks, in any precision, and whichever other layers have LoRA.
    For DoRA this is a collective. ``seed`` is the same on all ranks.
    """
    for name, layer in adapter_layers(decoder).items():
        a = torch.empty(tuple(layer.lora_a.weight.shape), dtype=torch.float32, device="cpu")
        # This slope makes the bound 1 / sqrt(in_dim).
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=_generator(seed, name))
        load_full_tensor(layer.lora_a.weight, a)
        load_full_tensor(layer.lora_b.weight, torch.zeros(tuple(layer.lora_b.weight.shape)))
        if isinstance(layer, DoRALinear):
            load_full_tensor(layer.magnitude, _row_norms(_upcast(full_tensor(layer.weight.detach()))))


@torch.no_grad()
def merged(decoder: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a plain decoder with the same outputs, one at a time; the decoder stays as it is.

    Computed in fp32 (fp64 for an fp64 decoder) and cast once to ``dtype``, by default the base weight's. Every rank must iterate over all
    of them: each layer's weights are gathered in turn. Merged weights come unsharded, all others as they are.
    """
    layers = adapter_layers(decoder)
    stored = decoder.state_dict()
    left_out = adapter_parameters(decoder).keys()
    for name, tensor in stored.items():
        if name in left_out:
            continue
        layer_name = name.removesuffix(".weight")
        if layer_name == name or layer_name not in layers:
            yield name, tensor
            continue
        layer = layers[layer_name]
        a, b = (full_tensor(stored[f"{layer_name}.{part}.weight"]) for part in ("lora_a", "lora_b"))
        magnitude = full_tensor(stored[f"{layer_name}.magnitude"]) if isinstance(layer, DoRALinear) else None
        yield name, merged_weight(full_tensor(tensor), a, b, scaling(layer), magnitude).to(dtype or tensor.dtype)


def merged_weight(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude: torch.Tensor | None
) -> torch.Tensor:
    """[out, in] W + scale * B A in fp32 or wider, DoRA's with the rows' norms of ``magnitude``, [out]."""
    merged = torch.addmm(_upcast(weight), _upcast(b), _upcast(a), alpha=scale)
    if magnitude is not None:
        merged *= (_upcast(magnitude) / _row_norms(merged)).unsqueeze(1)
    return merged


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _row_norms(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(weight, dim=1)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
