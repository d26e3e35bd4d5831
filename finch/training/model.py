"""The decoder of a config on the meta device, and faster kernels for its layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torchtune import modules, training
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import build, component_of, did_you_mean
from finch.distributed.precision import Precision
from finch.distributed.tensor_parallel import Plan, check_plan
from finch.models.families import replace_known_bad_builder
from finch.training.config_checks import check_text_decoder

T = TypeVar("T")
_MAX_LAYERS = 10_000
_ROTATES_PAIRS = (RotaryPositionalEmbeddings.forward, Llama3ScaledRoPE.forward)
_ROTATES_HALVES = (Qwen2RotaryPositionalEmbeddings.forward,)


def decoder_on_meta(cfg: DictConfig, precision: Precision) -> tuple[modules.TransformerDecoder, Plan | None, str]:
    """The decoder on the meta device, the tensor-parallel plan if there is one, and the builder's name. Reads no file.

    Raises UserError for a model that is no text decoder, and for layers that do not exist.
    """
    node, message = replace_known_bad_builder(cfg.model)
    if message is not None:
        logger.warning(message)
    layers = node.get("num_layers", 1)
    if type(layers) is not int or not 1 <= layers <= _MAX_LAYERS:  # each takes time, on the meta device as well
        raise UserError(f"model.num_layers={layers} must be a whole number from 1 to {_MAX_LAYERS:,}; correct it")
    with training.set_default_dtype(precision.weights), torch.device("meta"):
        decoder = build(node, "model")
    component = component_of(node) or ""
    check_text_decoder(decoder, component)
    plan = None
    if cfg.tensor_parallel_dim > 1:
        plan = build(cfg.tensor_parallel_plan, "tensor_parallel_plan")
        check_plan(decoder, plan, cfg.tensor_parallel_dim)
    _check_custom_layers(decoder, cfg.custom_sharded_layers or [])
    return decoder, plan, component


def _check_custom_layers(decoder: nn.Module, names: Iterable[str]) -> None:
    """Checks that the model has the layers of ``custom_sharded_layers``."""
    known = {name for name, _ in decoder.named_modules()} | {"output"}
    for name in names:
        if name not in known:
            raise UserError(f"custom_sharded_layers names {name}, which the model lacks{did_you_mean(name, known)}")


def compile_layers(decoders: Iterable[modules.TransformerDecoder]) -> None:
    """Compiles each layer, with the activation checkpointing that wraps it."""
    for layer in (layer for decoder in decoders for layer in decoder.layers):
        layer.compile(backend=compile_backend())


def compile_backend() -> str:
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's switch


def use_fast_rotary(decoder: modules.TransformerDecoder) -> None:
    """Lets torchtune's rotary embeddings call :func:`rotate_pairs` or :func:`rotate_halves`; others stay as they are.

    Of neighbouring dimensions torchtune computes real and imaginary parts in eight products of tensors with stride 2, and as many again in
    the backward. Either way it looks up each token's angles for the queries and the keys of each layer.
    """
    for module in decoder.modules():
        if type(module).forward in _ROTATES_PAIRS:
            module.forward = functools.partial(rotate_pairs, module)
        elif type(module).forward in _ROTATES_HALVES:
            module.forward = functools.partial(rotate_halves, module)


def use_fused_norm(decoder: modules.TransformerDecoder) -> None:
    """Lets torchtune's RMS norms keep 16-bit inputs: their conversion to fp32 keeps torch from its fused kernel, which computes in fp32 too. And
    fp64 ones, which it would round."""
    for module in decoder.modules():
        if type(module) is modules.RMSNorm:
            module.forward = functools.partial(_norm, module)


def _norm(norm: modules.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    if keeps_fused_norm(norm, x):
        return F.rms_norm(x, norm.normalized_shape, norm.scale, norm.eps)
    return type(norm).forward(norm, x)


def keeps_fused_norm(norm: modules.RMSNorm, x: torch.Tensor) -> bool:
    """Whether torch's fused kernel takes a layer's input as it is."""
    return x.dtype == norm.scale.dtype and x.dtype.itemsize != 4


def rotate_pairs(rotary: nn.Module, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
    """What ``rotary(x, input_pos=input_pos)`` returns, computed in fp32 as there, but in fp64 for an fp64 model.

    The product's last bit depends on where in the tensor an element lies: vectors and what is left over round differently.

    ``rotary.cache`` holds cosine and sine, [positions, head_dim / 2, 2]; ``x`` and the result are [batch, seq, heads, head_dim];
    ``input_pos``: [batch, seq] position of each token in its own sample; None: 0 to seq - 1.
    """

    def rotations(table: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(table.float()).unsqueeze(2)  # [batch, seq, 1, head_dim / 2]

    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    product = pairs * _looked_up(rotary, x.shape[1], input_pos, torch.float32, rotations)
    return torch.view_as_real(product).flatten(-2).type_as(x)


def rotate_halves(rotary: nn.Module, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
    """What ``rotary(x, input_pos=input_pos)`` returns, bit for bit; ``rotary.cache`` holds cosine and sine, [positions, 2 * head_dim]."""

    def angles(table: torch.Tensor) -> Sequence[torch.Tensor]:
        return table.to(x.dtype).unsqueeze(2).chunk(2, dim=-1)  # [batch, seq, 1, head_dim] each

    cosine, sine = _looked_up(rotary, x.shape[1], input_pos, x.dtype, angles)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _looked_up(
    rotary: nn.Module,
    seq: int,
    positions: torch.Tensor | None,
    dtype: torch.dtype,
    convert: Callable[[torch.Tensor], T],
) -> T:
    """The rows of a rotary table, [batch, seq, ...], converted. All layers get the same tensor of positions, which keeps them: once per micro-batch."""
    table = rotary.get_buffer("cache")
    if positions is None:
        return convert(table[None, :seq])
    kept = vars(positions).setdefault("rotations", {})
    if (rotary, dtype) not in kept:
        kept[rotary, dtype] = convert(table[positions])
    return kept[rotary, dtype]
