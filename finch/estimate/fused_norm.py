"""CUDA's fused RMS norm as one operator of fake tensors: on a CPU torch takes it apart."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torchtune.modules import RMSNorm

from finch.training.model import keeps_fused_norm


@torch.library.custom_op("finch::rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("only its shapes are known")


@torch.library.custom_op("finch::rms_norm_backward", mutates_args=())
def _norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only its shapes are known")


_norm.register_fake(lambda x, weight: torch.empty_like(x))
_norm_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
_norm.register_autograd(
    lambda ctx, grad: _norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def count_norms_as_one(model: nn.Module) -> None:
    """Of the layers that :func:`finch.training.model.use_fused_norm` has changed, those that a GPU gives to the fused kernel."""
    for module in model.modules():
        if type(module) is RMSNorm and isinstance(module.forward, functools.partial):
            module.forward = functools.partial(_forward, module, module.forward)


def _forward(norm: RMSNorm, apart: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _norm(x, norm.scale) if keeps_fused_norm(norm, x) else apart(x)
    return result
