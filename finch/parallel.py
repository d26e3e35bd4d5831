"""Process group, mesh, sharding, and sums over ranks; with one process the communication is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from finch.errors import UserError


@dataclass
class Parallel:
    """The ranks of a run as its training step sees them.

    ``mesh`` is the data-parallel mesh parameters are sharded over; None means one process without FSDP2.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def data_parallel_size(self) -> int:
        return self.world_size

    @property
    def data_parallel_rank(self) -> int:
        return self.rank

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums ``values`` over the data-parallel ranks, in place; every rank gets the same bits."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def check_equal(self, name: str, values: torch.Tensor) -> None:
        """Compares ``values`` bit for bit over the ranks (``debug_checks``).

        Raises:
            RuntimeError: they differ; this is a defect of finch, not a user's mistake.
        """
        if self.world_size == 1:
            return
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values)
        # Bit patterns, so that a NaN equals itself.
        if any(not torch.equal(other.view(torch.uint8), gathered[0].view(torch.uint8)) for other in gathered):
            raise RuntimeError(f"{name} differs between ranks: {[other.tolist() for other in gathered]}")

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order; small Python objects."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def start(device: torch.device, *, shard: bool, offload: bool = False, timeout_s: float = 1800.0) -> Parallel:
    """Joins torchrun's process group if there is one and lays the data-parallel mesh.

    Args:
        device: this rank's device.
        shard: whether FSDP2 is needed even in one process (mixed precision, CPU offload). Without need one process
            runs unsharded: FSDP2 at world size 1 took 22% longer a step on a 0.26 M parameter model on CPU.
        offload: whether parameters will live on the CPU, whose collectives then need gloo beside NCCL.
        timeout_s: seconds after which a collective that hangs is an error.

    Raises:
        UserError: torchrun started more ranks than there are devices.
    """
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(device.type) or dist.get_default_backend_for_device(device)
    if offload and device.type != "cpu":
        backend = f"{device.type}:{backend},cpu:gloo"
    timeout = timedelta(seconds=timeout_s)
    if is_launched():
        # device_id binds NCCL's communicator to this GPU; gloo wants none.
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    elif shard:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        return Parallel(device)
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",)) if world_size > 1 or shard else None
    return Parallel(device, dist.get_rank(), world_size, mesh)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(name: str | None) -> torch.device:
    """This rank's device: ``cpu``, or the GPU of its local rank. ``auto`` and None: CUDA where there is one.

    Raises:
        UserError: the device does not exist here.
    """
    kind = name if name not in (None, "auto") else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not str(kind).startswith("cuda"):
        raise UserError(f"device={name} is not known: use cpu, cuda or auto")
    if not torch.cuda.is_available():
        raise UserError(
            f"device={name} was asked for, but torch sees no CUDA device here: use device=cpu, or install a CUDA build of torch"
        )
    try:
        index = torch.device(kind).index
    except RuntimeError as error:
        raise UserError(f"device={name} is not a device: use cpu, cuda, cuda:N or auto") from error
    index = int(os.environ.get("LOCAL_RANK", 0)) if index is None else index
    if index >= torch.cuda.device_count():
        raise UserError(
            f"local rank {index} has no GPU: this machine has {torch.cuda.device_count()}; start at most that many ranks with --nproc_per_node"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def shard_model(
    model: nn.Module,
    layers: Iterable[nn.Module],
    parallel: Parallel,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Applies FSDP2 to each of ``layers`` and then to ``model``, whose group takes what is left (norm, output, embeddings)."""
    if parallel.mesh is None:
        return
    options: dict[str, Any] = {
        "mesh": parallel.mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mixed_precision or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=parallel.device.type == "cuda") if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; a collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole tensor into a parameter that may be sharded; every rank cuts out its own part, without communication."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            whole = value.to(parameter.device_mesh.device_type, parameter.dtype)
            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)
