"""Tensors that may be sharded: the same calls for DTensors and for plain tensors. Needs torch alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; a collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_local(value: Any) -> Any:
    """This rank's part of a tensor that may be sharded, sharing its memory; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def load_full_tensor(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole tensor into a parameter that may be sharded; every rank cuts out its own part, without communication."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            whole = value.to(parameter.device_mesh.device_type, parameter.dtype)
            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)


def group_by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors that lie on the same mesh. torch's fused and foreach kernels take one mesh at a time, and under tensor
    parallelism there are two: the plan's weights are cut by it, the norms are not."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
