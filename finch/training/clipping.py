"""Clipping: the norm of all gradients, and how they are scaled to a limit, as torch's ``clip_grads_with_norm_`` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from finch.base import dtensor

_EPS = 1e-6


@torch.no_grad()
def grad_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients over all shards, [], in fp32 or wider; a collective where they are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in gradients) else torch.float32
    # Not get_total_norm, which returns the norm of bf16 gradients in bf16: up to 0.4% off.
    norms = [_norm(group, dtype) for group in dtensor.group_by_mesh(gradients, by_placements=True)]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[] of gradients that are sharded alike; a collective where they are. The shards are plain tensors: norms of DTensors take the host three
    times as long."""
    norms = torch.stack(torch._foreach_norm([dtensor.to_local(each) for each in gradients], 2, dtype))
    if isinstance(first := gradients[0], DTensor):
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():  # FSDP2's shards under tensor parallelism are of another class than Shard
                norms = norms.square()
                distributed.all_reduce(norms, group=first.device_mesh.get_group(dimension))
                norms = norms.sqrt()
    return torch.linalg.vector_norm(norms)


def divisor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """[] what a fused optimizer's kernel divides the gradients by when it reads them, without a separate scaling pass."""
    return ((norm + _EPS) / limit).clamp(min=1.0).float()


def scale_gradients(parameters: Sequence[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scales them in memory, so that their norm is at most ``limit``."""
    gradients = [dtensor.to_local(each.grad) for each in parameters if each.grad is not None]
    torch._foreach_mul_(gradients, (limit / (norm + _EPS)).clamp(max=1.0))
