"""What a training step does, seen from the operators that torch dispatches: memory, collectives, operations."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from finch.base.dtensor import to_local
from finch.plan.estimate.formula import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OTHER,
    RECOMPUTED,
    REDUCED,
    REFERENCE,
    WEIGHTS,
)
from finch.training.chunked_loss import TokenLoss

FORWARD_PASS, RECOMPUTATION, BACKWARD_PASS, UPDATE = "forward", "recomputation", "backward", "update"

_PARTS = {FORWARD_PASS: ACTIVATIONS, RECOMPUTATION: RECOMPUTED, BACKWARD_PASS: BACKWARD, UPDATE: OTHER}
# torch's counter has no formula for the CPU's attention.
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

# Of the two families of operators: torch.distributed's calls and DTensor's functional collectives.
_KINDS = {"_allgather_base_": ALL_GATHER, "_reduce_scatter_base_": REDUCE_SCATTER, "allreduce_": ALL_REDUCE}
_KINDS |= {"all_gather_into_tensor": ALL_GATHER, "reduce_scatter_tensor": REDUCE_SCATTER}
_KINDS |= {"all_reduce": ALL_REDUCE, "all_reduce_": ALL_REDUCE}
_WAIT = "wait_tensor"
_NO_KERNEL = {"detach", "_unsafe_view", "lift_fresh", "set_", "resize_", "record_stream", "_local_scalar_dense", _WAIT}
_LOOKUPS = ("embedding", "index_select", "index", "gather")
"""Operators that read as much of a tensor as they return."""


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    part: str
    time: int


class LiveMemory:
    """Follows storages from their allocation until they are freed.

    A storage belongs to one part for all its life: one that :meth:`assign` gives to another part belonged to it at the peak as well.

    Attributes:
        total: bytes that are live.
        peak: the most that were live since ``reset_peak``.
        peak_phase: the ``phase`` that was given for the storage that made the peak.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._parts: Counter[str] = Counter()
        self._time = 0
        self.total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """The peak is what is live now."""
        self.peak, self.peak_phase, self._peak_time = self.total, "", self._time
        self._at_peak = Counter(self._parts)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each part at the peak, without empty ones."""
        return {part: nbytes for part, nbytes in self._at_peak.items() if nbytes}

    def live(self) -> dict[str, int]:
        """Bytes of each part now, without empty ones."""
        return {part: nbytes for part, nbytes in self._parts.items() if nbytes}

    def add(self, tensor: torch.Tensor, part: str, phase: str = "") -> None:
        """Follows a tensor's storage, if it is not followed yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, functools.partial(self._release, key))
            self._storages[key] = entry = _Storage(reference, 0, part, 0)
            self._allocate(entry, storage.nbytes(), phase)
        elif known.nbytes != storage.nbytes():
            self.resize(storage, phase)

    def resize(self, storage: torch.UntypedStorage, phase: str = "") -> None:
        """Reads the new size of a storage that was resized in place; one that is not followed is left alone."""
        entry = self._storages.get(storage._cdata)
        if entry is not None:
            self._free(entry)
            self._allocate(entry, storage.nbytes(), phase)

    def assign(self, value: Any, part: str) -> None:
        """Gives the storage of a tensor, of a sharded one the local shard's, to another part; other values are left alone."""
        tensor = to_local(value)
        if isinstance(tensor, torch.Tensor):
            self.add(tensor, part)
            self.assign_storage(tensor.untyped_storage(), part)

    def assign_storage(self, storage: torch.UntypedStorage, part: str) -> None:
        """As :meth:`assign`; one that is not followed is left alone."""
        entry = self._storages.get(storage._cdata)
        if entry is None:
            return
        self._parts[entry.part] -= entry.nbytes
        self._parts[part] += entry.nbytes
        if entry.time <= self._peak_time:  # it is live now and was allocated before the peak: it was live then
            self._at_peak[entry.part] -= entry.nbytes
            self._at_peak[part] += entry.nbytes
        entry.part = part

    def _allocate(self, entry: _Storage, nbytes: int, phase: str) -> None:
        self._time += 1
        entry.nbytes, entry.time = nbytes, self._time
        self._parts[entry.part] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.peak_phase, self._peak_time = self.total, phase, self._time
            self._at_peak = Counter(self._parts)

    def _free(self, entry: _Storage) -> None:
        self._parts[entry.part] -= entry.nbytes
        self.total -= entry.nbytes
        entry.nbytes = 0

    def _release(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        entry = self._storages.get(key)
        if entry is not None and entry.reference is reference:
            self._free(self._storages.pop(key))


@dataclass(frozen=True)
class Collective:
    """One call on one rank.

    Attributes:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, or the operator's name for another.
        nbytes: of the complete tensor: what an all-gather returns, what the others are given.
        ranks: of its group.
        farthest: the group's highest rank; this one is rank 0.
    """

    kind: str
    nbytes: int
    ranks: int
    farthest: int

    @property
    def sent_bytes(self) -> int:
        """What a rank sends, and receives, in a ring: (N - 1) / N of the tensor, twice that for an all-reduce."""
        rounds = 2 if self.kind == ALL_REDUCE else 1
        return rounds * self.nbytes * (self.ranks - 1) // self.ranks


def collective_of(function: Any, arguments: Sequence[Any], output: Any) -> Collective | None:
    """The collective that a dispatched operator is; None for any other operator."""
    name = function._overloadpacket.__name__
    kind = _KINDS.get(name, name)
    if function.namespace == "c10d":
        group = next(filter(None, map(_group, arguments)))
        # The output comes first for those that have one.
        nbytes = _nbytes(arguments[1] if kind == REDUCE_SCATTER else arguments[0])
    elif function.namespace == "_c10d_functional" and name != _WAIT:
        group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        nbytes = _nbytes(output if kind == ALL_GATHER else arguments[0])
    else:
        return None
    return Collective(kind, nbytes, group.size(), max(dist.get_process_group_ranks(group)))


def _group(value: Any) -> dist.ProcessGroup | None:
    """A process group as operators take it; None for another argument."""
    if isinstance(value, torch.ScriptObject):
        with suppress(RuntimeError, TypeError):
            value = dist.ProcessGroup.unbox(value)
    return value if isinstance(value, dist.ProcessGroup) else None


def _used_bytes(value: Any) -> int:
    """Of a tensor, what of its memory an operator reads or writes: one value of those that a view repeats."""
    if not isinstance(value, torch.Tensor):
        return 0
    return min(value.nbytes, value.untyped_storage().nbytes())


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(value))


class StepTrace(TorchDispatchMode):
    """Counts while it is active. For fake tensors: what fused optimizers update is left as it is.

    Args:
        model: parallelized and in memory.

    Attributes:
        memory: what is live, by the parts that formula.py names.
        is_paused: whether nothing is counted for now.
        micro_batch: the current one, from 1.
        collectives: in their order, with micro-batch and phase.
        flops: floating-point operations of matrix products and attention by micro-batch and phase. Attention counts all pairs of its
            queries and keys, causal or not.
        launches: operators that run something on the device, likewise.
        moved_bytes: that they read and write, likewise; of a table that is looked up only what is found.
    """

    def __init__(self, model: TokenLoss) -> None:
        super().__init__()
        self.memory = LiveMemory()
        self.reset()
        self._vocab_size = model.decoder.tok_embeddings.weight.shape[0]
        self._is_in_forward = False
        self._part: str | None = None
        self.is_paused = False
        for weight in model.decoder.parameters():
            self.memory.assign(weight, WEIGHTS)
        for weight in () if model.reference is None else model.reference.parameters():
            self.memory.assign(weight, REFERENCE)
        for buffer in model.buffers():
            self.memory.assign(buffer, BUFFERS)
        for weight in model.trained_parameters().values():
            weight.register_post_accumulate_grad_hook(lambda weight: self.memory.assign(weight.grad, GRADIENTS))
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward)

    @contextmanager
    def allocating(self, part: str) -> Iterator[None]:
        """All storages that are allocated inside belong to ``part``."""
        self._part = part
        yield
        self._part = None

    def reset(self) -> None:
        """Starts to count from here; what is live stays known."""
        self.memory.reset_peak()
        self.micro_batch = 0
        self.collectives: list[tuple[int, str, Collective]] = []
        self.flops, self.launches, self.moved_bytes = (Counter[tuple[int, str]]() for _ in range(3))

    @property
    def phase(self) -> str:
        """Of the step: forward, recomputation, backward or update."""
        if torch._C._current_graph_task_id() == -1:
            return FORWARD_PASS if self._is_in_forward else UPDATE
        return RECOMPUTATION if torch.is_grad_enabled() else BACKWARD_PASS  # a backward runs without gradients

    def __enter__(self) -> StepTrace:
        self._resize = torch.UntypedStorage.resize_

        # FSDP2 frees gathered weights so; no operator is dispatched
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self.memory.assign_storage(storage, GATHERED)
            self._resize(storage, size)
            self.memory.resize(storage, self.phase)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        propagate = self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        # what DTensor computes of an operator's complete result, on other fake tensors
        def propagate_uncounted(*args: Any) -> Any:
            self.is_paused = True
            try:
                return propagate(*args)
            finally:
                self.is_paused = False

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_uncounted  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._overloadpacket.__name__
        if name.startswith("_fused_") and isinstance(args[0], list):
            self.launches[self.micro_batch, self.phase] += 1
            # It reads weights, gradients and states, and writes all but the gradients.
            sizes = [sum(_used_bytes(to_local(each)) for each in given) for given in args if isinstance(given, list)]
            self.moved_bytes[self.micro_batch, self.phase] += 2 * sum(sizes) - sizes[1]
            return None  # fused optimizers: in place, without temporary tensors. torch would run their kernels on zeros
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a sharded tensor: the operators on its shard come here
        output = function(*args, **kwargs)
        if self.is_paused:
            return output
        phase = self.phase
        if name == "varlen_attention" and phase == BACKWARD_PASS:
            phase = RECOMPUTATION  # an operator of our own, inside of which gradients are off
        if launches_kernel(function):
            self.launches[self.micro_batch, phase] += 1
            moved = (output, output) if name in _LOOKUPS else (args, output)
            self.moved_bytes[self.micro_batch, phase] += sum(map(_used_bytes, tree_leaves(moved)))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.memory.add(tensor, self._part or self._part_of(tensor, phase), phase)
        self._count_operations(function, name, args, kwargs, output, phase)
        collective = collective_of(function, args, output)
        if collective is not None:
            self.collectives.append((self.micro_batch, phase, collective))
            if collective.kind == ALL_GATHER and phase != UPDATE:
                self._assign(args[:2], GATHERED)
            elif collective.kind == REDUCE_SCATTER:
                self._assign(args[1:2], REDUCED)
        return output

    def _begin_forward(self, *_: Any) -> None:
        self._is_in_forward = True
        self.micro_batch += 1

    def _end_forward(self, *_: Any) -> None:
        self._is_in_forward = False

    def _assign(self, values: Any, part: str) -> None:
        for value in tree_leaves(values):
            self.memory.assign(value, part)

    def _part_of(self, tensor: torch.Tensor, phase: str) -> str:
        is_of_vocabulary = tensor.dim() > 0 and tensor.shape[-1] == self._vocab_size
        return LOGITS if is_of_vocabulary and phase != UPDATE else _PARTS[phase]

    def _count_operations(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, phase: str
    ) -> None:
        if (formula := flop_registry.get(function._overloadpacket)) is not None:
            self.flops[self.micro_batch, phase] += formula(*args, **kwargs, out_val=output)
        elif name == _CPU_ATTENTION:
            self.flops[self.micro_batch, phase] += sdpa_flop_count(*(each.shape for each in args[:3]))
        elif name == f"{_CPU_ATTENTION}_backward":
            self.flops[self.micro_batch, phase] += sdpa_backward_flop_count(*(each.shape for each in args[:4]))


def launches_kernel(function: Any) -> bool:
    """Whether an operator runs something on the device: not views, empty tensors and what only asks for a size."""
    name = function._overloadpacket.__name__
    return not (function.namespace in ("prim", "profiler") or function.is_view or name in _NO_KERNEL or "empty" in name)
