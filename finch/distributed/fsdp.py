"""FSDP2: sharding a model, and the norm and clipping of sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from finch.distributed.parallel import Parallel
from finch.dtensor import full_tensor, group_by_mesh


def shard_model(
    model: nn.Module,
    layers: Iterable[nn.Module],
    parallel: Parallel,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
    pin_memory: bool = True,
) -> None:
    """Applies FSDP2 to each of ``layers`` and then to ``model``, whose group holds the rest (norm, output, embeddings).

    Args:
        pin_memory: of offloaded shards. False with the optimizer inside the backward, whose hooks would read gradients that FSDP2 is
            still copying.
    """
    if parallel.mesh is None:
        return
    options: dict[str, Any] = {
        "mesh": parallel.mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mixed_precision or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin_memory and parallel.device.type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def grad_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients over all shards, []; a collective where they are sharded."""
    groups = group_by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)
    norms = [full_tensor(nn.utils.get_total_norm(group)) for group in groups]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before, []."""
    parameters = list(parameters)
    norm = grad_norm(parameters)
    for group in group_by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
