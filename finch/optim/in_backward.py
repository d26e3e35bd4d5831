"""The optimizer step inside the backward: a gradient is used and freed as soon as it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def optimizers_in_backward(
    parameters: Iterable[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]
) -> list[Optimizer]:
    """One optimizer a parameter, each stepped by its parameter's hook during the backward.

    At no time do the gradients of the whole model exist. So there is no norm over them to clip by, and no second
    micro-batch to add to them; and the learning rate must be set before the backward. FINCH's can be: it depends on the
    loss alone (:class:`finch.FinchLR` takes the list).

    Args:
        parameters: sharded by FSDP2 or not.
        build: makes an optimizer of one parameter.
    """
    optimizers = []
    for parameter in parameters:
        optimizer = build([parameter])
        parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
        optimizers.append(optimizer)
    return optimizers


def _step(optimizer: Optimizer, _: torch.Tensor) -> Any:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
