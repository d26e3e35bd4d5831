"""The same calls for sharded tensors (DTensor) and plain ones. Needs only torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


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
    """A tensor's shards in turn, on rank 0, to which the others send theirs; a collective of all ranks if ``tensor`` is sharded.

    Yields the part of the global tensor that the shard holds, a slice for each dimension, and the shard; on the other ranks nothing, if
    ``tensor`` is sharded. Rank 0 holds one shard of another rank at a time, never the complete tensor. Copies on other ranks are left out.
    """
    if not isinstance(tensor, DTensor):
        yield local_block(tensor), tensor
        return
    local, mesh, this_rank = tensor.to_local(), tensor.device_mesh, dist.get_rank()
    # Next to a mesh without the tensor-parallel dimension there are others, of the same ranks shifted: rank 0's is taken on all.
    ranks = (mesh.mesh - mesh.mesh.min()).flatten().tolist()
    seen = set()
    for rank, place in zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        block = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, list(place), tensor.placements)
        # All ranks compute the same blocks and leave out the same ones, so that each send is received.
        if block in seen or 0 in block[0]:
            continue
        seen.add(block)
        if this_rank not in (rank, 0):
            continue
        shard = local.contiguous() if rank == this_rank else local.new_empty(block[0])
        if rank != 0:
            move = dist.P2POp(dist.isend, shard, 0) if rank == this_rank else dist.P2POp(dist.irecv, shard, rank)
            # As a batch, which takes NCCL's communicator of all ranks; a single one would make another for each pair.
            for work in dist.batch_isend_irecv([move]):
                work.wait()
        if this_rank == 0:
            yield tuple(slice(start, start + size) for size, start in zip(*block, strict=True)), shard


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


def group_by_mesh(tensors: Iterable[torch.Tensor], *, by_placements: bool = False) -> list[list[torch.Tensor]]:
    """Groups tensors by the device mesh they lie on, and ``by_placements`` on it; plain tensors form one group.

    torch's fused and foreach kernels accept tensors of one mesh at a time. Under tensor parallelism there are two: the weights
    that the plan shards lie on (data, tensor), the norms only on the data dimension.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, by_placements and tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())
