"""FSDP2: a model sharded over the ranks of a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from finch.distributed.parallel import Parallel

T = TypeVar("T")


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
    for layer in layers:
        fully_shard(layer, **options)
    # The root's inputs are tokens, masks and, for a KL divergence, log-probabilities, which must not be rounded to bf16.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    # The root's backward follows its forward at once: to free its weights in between would only gather them twice.
    fully_shard(model, **{**options, "mp_policy": policy, "reshard_after_forward": False})
    # The root keeps its gathered weights after a forward: without a backward nothing else would free them.
    model.register_forward_hook(_reshard_without_backward)


def prefetch(layers: Iterable[nn.Module]) -> None:
    """Has each of ``layers``, in the order in which they run, gather the next one: else that waits for the host to get there."""
    for layer, following in itertools.pairwise(layers):
        if isinstance(layer, FSDPModule) and isinstance(following, FSDPModule):
            layer.set_modules_to_forward_prefetch([following])


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


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled():
        reshard(model)
