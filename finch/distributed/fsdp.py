"""FSDP2: a model sharded over the ranks of a mesh."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from finch.distributed.parallel import Parallel

T = TypeVar("T")
_RESHARDS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether a root's layers free their weights after a forward; without roots whose weights stay gathered for now."""
MOST_LAYERS, MOST_BYTES = 4, 2**30
"""Of a group: each costs the host a hook, a copy and a collective, forward and backward; beyond four layers little is left to save."""
MOST_OF_FREE = 0.5
"""Share of the free memory that gathered weights may take: keys, values and logits need the rest."""


def shard_model(
    model: nn.Module,
    groups: Iterable[nn.Module | list[nn.Module]],
    parallel: Parallel,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
    pin_memory: bool = True,
) -> None:
    """Applies FSDP2 to each of ``groups``, a module or several that run one after the other, and then to ``model``, whose group holds the rest
    (norm, output, embeddings).

    ``pin_memory`` of offloaded shards must be False with the optimizer inside the backward, whose hooks would read gradients that FSDP2
    is still copying.
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
    for group in groups:
        fully_shard(group, **options)
    # The root's inputs are tokens, masks and, for a KL divergence, log-probabilities, which must not be rounded to bf16.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    # The root's backward follows its forward at once: to free its weights in between would only gather them twice.
    fully_shard(model, **{**options, "mp_policy": policy, "reshard_after_forward": False})
    # The root keeps its gathered weights after a forward: without a backward nothing else would free them.
    model.register_forward_hook(_reshard_without_backward)
    _RESHARDS[model] = reshard_after_forward


def layer_groups(layers: Iterable[T], nbytes: int, size: int | None) -> list[list[T]]:
    """The layers of a model in groups of ``size``; None: of as many as help. ``nbytes``: of a layer, gathered."""
    layers, size = list(layers), size or min(MOST_LAYERS, max(1, MOST_BYTES // nbytes))
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def prefetch(groups: Iterable[Sequence[nn.Module]]) -> None:
    """Has each of ``groups``, in the order in which they run, gather the next one: else that waits for the host to get there."""
    for (first, *_), (following, *_) in itertools.pairwise(groups):
        if isinstance(first, FSDPModule) and isinstance(following, FSDPModule):
            first.set_modules_to_forward_prefetch([following])


def reduce_last(model: nn.Module, batches: Sequence[T], *, each: bool) -> Iterator[T]:
    """The micro-batches of a step. Gradients are reduced over the ranks in the last one's backward; until then each rank adds to its own,
    complete ones. With ``each`` they are reduced in every backward, which needs less memory."""
    for number, batch in enumerate(batches, start=1):
        if isinstance(model, FSDPModule) and not each:
            model.set_requires_gradient_sync(number == len(batches))
        yield batch


def reshard(model: nn.Module) -> None:
    """Frees gathered weights after a forward that no backward follows: the optimizer and a checkpoint would see them instead of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module, parallel: Parallel, dtype: torch.dtype) -> Iterator[None]:
    """Gathers each weight once for all forwards inside, none of which a backward follows; a collective.

    Where a rank has no room for the complete model in ``dtype``, the computation's, each forward gathers it, layer by layer.
    """
    size = dtype.itemsize * sum(weight.numel() for weight in model.parameters())
    free = free_memory(parallel.device)
    has_room = free is None or size <= MOST_OF_FREE * free
    # Together: what one rank gathers all others take part in.
    if model not in _RESHARDS or not parallel.all_true(has_room):
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    reshards = _RESHARDS.pop(model)
    try:
        for layer in layers:
            layer.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(reshards, recurse=False)
        _RESHARDS[model] = reshards
        reshard(model)


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors may still take on a GPU; None: not known."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled() and model in _RESHARDS:
        reshard(model)
