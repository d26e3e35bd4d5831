"""The process group, the device mesh and sums over ranks; with one process the communication is skipped."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from finch.base.errors import UserError
from finch.distributed.processes import is_launched


@dataclass(frozen=True)
class MeshSizes:
    """The number of ranks in each dimension of the mesh; torchtune's keys ``data_parallel_replicate_dim``,
    ``data_parallel_shard_dim`` and ``tensor_parallel_dim``.

    Attributes:
        replicate: copies of the sharded model (HSDP); gradients are averaged over them.
        shard: ranks a copy is sharded over (FSDP2); -1: all remaining ones.
        tensor: tensor-parallel ranks, which share each matrix product and see the same samples.
    """

    replicate: int = 1
    shard: int = -1
    tensor: int = 1

    def resolve(self, world_size: int) -> MeshSizes:
        """The sizes with ``shard`` resolved. Raises UserError if they do not multiply to the world size."""
        given = f"data_parallel_replicate_dim={self.replicate} x tensor_parallel_dim={self.tensor}"
        shard = self.shard
        if shard == -1:
            shard, rest = divmod(world_size, self.replicate * self.tensor)
            if rest or shard == 0:
                raise UserError(
                    f"{given} does not divide the {describe_ranks(world_size)} that were started; start a multiple of {self.replicate * self.tensor}, or change the sizes"
                )
        elif self.replicate * shard * self.tensor != world_size:
            raise UserError(
                f"data_parallel_shard_dim={shard} x {given} is {self.replicate * shard * self.tensor}, but {describe_ranks(world_size)} started; change the sizes, or set data_parallel_shard_dim=-1 for all remaining ranks"
            )
        return MeshSizes(self.replicate, shard, self.tensor)


@dataclass
class Parallel:
    """This rank and the others of a run.

    Attributes:
        mesh: what FSDP2 shards over, [shard] or with HSDP [replicate, shard]; None: one process without FSDP2.
        tensor_mesh: the ranks of this one's tensor-parallel group; None without tensor parallelism.
        data_group: one rank of each tensor-parallel group, which see different samples; None: all ranks.
        host_group: all ranks, for Python objects, which stay in host memory; None: the default group, which does that.
        data_parallel_size: how many ranks see different samples.
        data_parallel_rank: this one's index among them.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def all_reduce_sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sums ``values`` over the data-parallel ranks, in place; every rank gets the same bits.

        The ranks of a tensor-parallel group hold the same values: they are counted once.
        """
        if self.data_parallel_size > 1:
            dist.all_reduce(values, group=self.data_group)
        return values

    def check_equal(self, name: str, value: float | torch.Tensor | None) -> None:
        """Compares a number, or each of several, bit for bit over the ranks (``debug_checks``); None is not compared. Raises RuntimeError
        if it differs, which is a defect of finch."""
        if self.world_size == 1 or value is None:
            return
        gathered = self.gather_all_ranks(value.tolist() if isinstance(value, torch.Tensor) else value)
        # By their texts, so that a NaN equals itself.
        if len({repr(each) for each in gathered}) > 1:
            raise RuntimeError(f"{name} differs between ranks: {gathered}")

    def require_equal(self, what: str, value: Any) -> None:
        """Compares a small Python object over the ranks. Raises UserError on each of them, which says ``what`` differs, if one has another than rank
        0: a node's disk may hold an older copy of a file."""
        gathered = self.gather_all_ranks((platform.node(), value))
        for rank, (node, other) in enumerate(gathered):
            if other != gathered[0][1]:
                raise UserError(
                    f"rank {rank} on {node} has other {what} than rank 0 on {gathered[0][0]}; give all nodes the same files and config"
                )

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every data-parallel rank, in rank order; anything that can be pickled."""
        if self.data_parallel_size == 1:
            return [value]
        ranks = self.world_size // self.data_parallel_size  # of a tensor-parallel group: one of them speaks for all
        return self.gather_all_ranks(None if self.rank % ranks else value)[::ranks]

    def all_true(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank, those of a tensor-parallel group included."""
        return all(self.gather_all_ranks(value))

    def gather_all_ranks(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order; small Python objects."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values


def start(
    device: torch.device,
    *,
    shard: bool,
    offload: bool = False,
    timeout_s: float = 1800.0,
    sizes: MeshSizes | None = None,
) -> Parallel:
    """Joins torchrun's process group if there is one, and creates the mesh.

    Args:
        shard: whether FSDP2 is needed even in one process (mixed precision, CPU offload). Otherwise one process
            runs unsharded: FSDP2 at world size 1 took 22% longer per step on a 0.26 M parameter model on CPU.
        offload: whether parameters will live on the CPU, whose collectives then need gloo next to NCCL.
        timeout_s: seconds after which a hung collective is an error.
        sizes: of the mesh's dimensions; None: FSDP2 over all ranks.

    Raises UserError before any rank waits for another if the sizes do not multiply to the number of ranks.
    """
    sizes = (sizes or MeshSizes()).resolve(launched_ranks())
    follow_nccl()
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(device.type) or dist.get_default_backend_for_device(device)
    if offload and device.type != "cpu":
        backend = f"{device.type}:{backend},cpu:gloo"
    timeout = timedelta(seconds=timeout_s)
    if is_launched():
        # device_id binds NCCL's communicator to this GPU; gloo takes none.
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    elif shard:
        # A store in memory: one process needs no port, which another run on this machine might have taken.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if launched_ranks() == 1 and not shard:
        return Parallel(device)
    return join(device, sizes, timeout)


def follow_nccl() -> None:
    """Gives gloo the first network interface of this node that ``NCCL_SOCKET_IFNAME`` names, by prefixes or after ``=`` whole, where gloo has none:
    it would bind to the host name's address, which on many clusters is that of a slow network, or of no other node."""
    names = os.environ.get("NCCL_SOCKET_IFNAME", "")
    wanted = tuple(filter(None, names.removeprefix("=").split(",")))
    here = [name for _, name in socket.if_nameindex()]
    found = [name for name in here if (name in wanted if names.startswith("=") else name.startswith(wanted))]
    if found and not names.startswith("^"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found[0])


def start_from(cfg: DictConfig, device: torch.device, *, shard: bool) -> Parallel:
    """:func:`start` with the sizes and the timeout of a recipe's config."""
    sizes = MeshSizes(cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim)
    offload, timeout_s = cfg.fsdp_cpu_offload, cfg.distributed_timeout
    return start(device, shard=shard, offload=offload, timeout_s=timeout_s, sizes=sizes)


def join(device: torch.device, sizes: MeshSizes, timeout: timedelta | None = None) -> Parallel:
    """This rank's place in the process group that exists, with the mesh over its ranks; ``sizes`` are resolved. ``timeout``: of objects'
    collectives on the host."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(
        device.type, (sizes.replicate, sizes.shard, sizes.tensor), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    data_mesh = mesh["dp_replicate", "dp_shard"]
    # The second: an L2 penalty over both is then one reduction.
    flat = [data_mesh._flatten("dp"), mesh["dp_shard", "tp"]._flatten("dp_shard_tp")] if sizes.tensor > 1 else []
    if timeout is not None:  # else torch's ten minutes with NCCL, whatever distributed_timeout says
        for group in (*mesh.get_all_groups(), *(each.get_group() for each in flat)):
            _set_pg_timeout(timeout, group)
    return Parallel(
        device,
        rank,
        world_size,
        # A dimension of one rank would be a copy to average over, or a shard, of nothing.
        mesh=data_mesh if sizes.replicate > 1 else mesh["dp_shard"],
        tensor_mesh=mesh["tp"] if sizes.tensor > 1 else None,
        data_group=flat[0].get_group() if flat else None,
        # NCCL would put what is pickled, such as reference losses of all rows, into the memory of every GPU.
        host_group=None if device.type == "cpu" or world_size == 1 else dist.new_group(timeout=timeout, backend="gloo"),
        data_parallel_size=world_size // sizes.tensor,
        data_parallel_rank=rank // sizes.tensor,  # the tensor-parallel dimension is the innermost
    )


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def launched_rank() -> int:
    """This process's rank among those torchrun started; 0 without it."""
    return int(os.environ["RANK"]) if is_launched() else 0


def launched_ranks() -> int:
    """The number of ranks torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def describe_ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def local_device(name: str | None) -> torch.device:
    """This rank's device: ``cpu``, or the GPU of its local rank. ``auto`` and None: CUDA where there is one. Raises UserError if the device
    does not exist here."""
    kind = name if name not in (None, "auto") else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not str(kind).startswith("cuda"):
        raise UserError(f"device={name} is not known: use cpu, cuda or auto")
    if not torch.cuda.is_available():
        raise UserError(
            f"device={name} needs a CUDA device, and torch sees none here: use device=cpu, or install a CUDA build of torch"
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
    if torch.device(kind).index is not None and launched_ranks() > 1:
        raise UserError(f"device={name} would put all {launched_ranks()} ranks on one GPU; use device=cuda")
    device = torch.device("cuda", index)
    # Before the first allocation, since segments that exist do not become expandable.
    use_expandable_segments()
    torch.cuda.set_device(device)
    return device


def use_expandable_segments() -> None:
    """Lets CUDA's allocator grow its segments: the sizes of batches without padding differ from step to step, and would leave gaps between
    fixed ones. What the environment says of the allocator stays."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # The older name warns on each rank from torch 2.11 on.
        set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        set_settings("expandable_segments:True")
