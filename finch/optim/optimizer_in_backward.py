"""The optimizer step inside the backward: each gradient is used and freed as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer


def optimizers_in_backward(
    parameters: Iterable[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]
) -> list[Optimizer]:
    """One optimizer a parameter, each stepped by its parameter's hook during the backward.

    The gradients of the complete model never exist at one time. So gradient clipping and accumulation are impossible,
    and the learning rate must be set before the backward. FINCH's can be: it depends on the loss alone
    (:class:`finch.FinchLR` accepts the list).

    Args:
        parameters: sharded by FSDP2 or not.
        build: builds the optimizer of one parameter.
    """
    optimizers = []
    for parameter in parameters:
        optimizer = build([parameter])
        parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
        optimizers.append(optimizer)
    return optimizers


def _step(optimizer: Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
