"""What a training step costs besides its arithmetic: the collectives it runs, and the tensor values that the host reads."""

from __future__ import annotations

import itertools
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys

_COLLECTIVES = ("c10d", "_c10d_functional")
_NO_DATA = ("wait_tensor", "_wrap_tensor_autograd")
# What has to know a value to make its result: on a GPU the host waits for it.
_READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"}
_METHODS = ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__")


class Collectives(TorchDispatchMode):
    """Records the collectives that this rank starts, each as [name, number of elements], in ``started``."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[list] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to its shards comes here again
        if function.namespace in _COLLECTIVES and function._opname not in _NO_DATA:
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            self.started.append([function._opname.strip("_"), max(map(torch.numel, tensors), default=0)])
        return function(*args, **(kwargs or {}))


class HostRead(AssertionError):
    """The host has read a value."""


class HostReads(TorchDispatchMode):
    """Raises HostRead where a tensor's value reaches the host once ``is_started`` is set, as if every tensor were on a GPU.

    What kernels and autograd's own C++ code do is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_started = False
        self._patch = mock.patch.multiple(torch.Tensor, **{name: self._method(name) for name in _METHODS})

    def __enter__(self):
        self.is_started = False
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_mask = function._opname.startswith("index") and any(
            isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)
            for value in tree_leaves(args[1:2])
        )
        if is_mask or function._opname in _READS:
            self._read(str(function))
        return function(*args, **(kwargs or {}))

    def _read(self, name: str) -> None:
        if self.is_started:
            raise HostRead(name)

    def _method(self, name):
        method = getattr(torch.Tensor, name)

        def read(*args, **kwargs):
            self._read(f"Tensor.{name}")
            return method(*args, **kwargs)

        return read


def start(config, *overrides):
    """The recipe, set up and ready for its first step."""
    import finch_full_finetune

    cfg = read(["--config", config, *overrides], FullFinetuneKeys)
    recipe = finch_full_finetune.FinchFullFinetune(cfg)
    recipe.setup(cfg)
    recipe.begin()
    return recipe


def take(recipe, batches):
    """A training step with its line in the metrics, without hooks."""
    metrics = recipe.train_step(batches)
    recipe.state.advance(recipe.data.order, recipe.data.steps_per_epoch)
    recipe.metrics_log.add(recipe.state.step, metrics)
    recipe.metrics_log.report()


def steps(recipe, number, epoch=0):
    """The micro-batches of an epoch's first steps."""
    order = recipe.data.order
    batches = recipe.data.batches(epoch, 0)
    for step in range(number):
        yield list(itertools.islice(batches, order.micro_batches_in_step(step * order.global_batch)))
