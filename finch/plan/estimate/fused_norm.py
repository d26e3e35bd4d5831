"""CUDA's fused RMS norm as one operator of fake tensors: on a CPU torch takes it apart."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import library, nn
from torch.distributed.tensor import DTensor
from torchtune.modules import RMSNorm

from finch.training.model import keeps_fused_norm

# Only their shapes are known.
library.define("finch::rms_norm", "(Tensor x, Tensor weight) -> Tensor")
library.define("finch::rms_norm_backward", "(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)")
library.register_fake("finch::rms_norm", lambda x, _: torch.empty_like(x))
library.register_fake("finch::rms_norm_backward", lambda _, *inputs: tuple(map(torch.empty_like, inputs)))
library.register_autograd(
    "finch::rms_norm",
    lambda ctx, grad: torch.ops.finch.rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def count_norms_as_one(model: nn.Module) -> None:
    """Of the layers that :func:`finch.training.model.use_fused_norm` has changed, those that a GPU gives to the fused kernel."""
    for module in model.modules():
        if type(module) is RMSNorm and isinstance(module.forward, functools.partial):
            module.forward = functools.partial(_forward, module, module.forward)


def _forward(norm: RMSNorm, apart: Any, x: torch.Tensor) -> torch.Tensor:
    is_one = keeps_fused_norm(norm, x) and not isinstance(norm.scale, DTensor)  # the operator has no sharding rule
    result: torch.Tensor = torch.ops.finch.rms_norm(x, norm.scale) if is_one else apart(x)
    return result
