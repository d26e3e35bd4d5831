"""The same calls for sharded tensors (DTensor) and plain ones. Needs only torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The complete tensor, of the global shape, on every rank; a collective if ``tensor`` is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_local(value: Any) -> Any:
    """This rank's shard, which shares the tensor's memory. Plain tensors and other values are returned unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_block(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The part of the global tensor, a slice for each dimension, that this rank's shard holds; of a plain tensor all of it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    [block] = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks a tensor for
    return tuple(slice(start, start + size) for start, size in zip(block.offsets, block.sizes, strict=True))


def each_shard(tensor: torch.Tensor) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """A tensor's shards in turn, on every rank; a collective of all ranks if ``tensor`` is sharded.

    Yields the part of the global tensor that the shard holds, a slice for each dimension, and the shard. A rank holds one shard of another
    rank at a time, never the complete tensor. Copies on other ranks are left out.
    """
    block = local_block(tensor)
    if not isinstance(tensor, DTensor):
        yield block, tensor
        return
    own = [(part.start, part.stop) for part in block]
    blocks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(blocks, own)
    for rank, bounds in enumerate(blocks):
        sizes = [stop - start for start, stop in bounds]
        if bounds in blocks[:rank] or 0 in sizes:
            continue
        local = tensor.to_local()
        shard = local.contiguous() if rank == dist.get_rank() else local.new_empty(sizes)
        dist.broadcast(shard, src=rank)
        yield tuple(slice(start, stop) for start, stop in bounds), shard


def load_full_tensor(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a complete tensor, the same on every rank, of any dtype and device, into a parameter, in place.

    Each rank copies its own shard, without communication.
    """
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            value = value.to(parameter.device_mesh.device_type, parameter.dtype)
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)


def group_by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors by the device mesh they lie on; plain tensors form one group.

    torch's fused and foreach kernels accept tensors of one mesh at a time. Under tensor parallelism there are two: the weights
    that the plan shards lie on (data, tensor), the norms only on the data dimension.
    """
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
