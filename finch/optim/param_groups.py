"""Setting the learning rates of param groups: all of several optimizers' by one number, or a single group's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

Scalar = float | torch.Tensor


class ParamGroups:
    """The param groups of some optimizers, whose learning rates keep the ratio to the first one's that they have at the start.

    A group's learning rate at the start is its ``initial_lr``, by the convention of torch's schedulers: the first schedule of
    an optimizer puts it there. A second one, as of a notebook cell that runs twice, starts from it and not from the last step's.
    The groups are looked up at each use, since ``Optimizer.load_state_dict`` replaces them. The ratios stay.

    Args:
        optimizer: one optimizer or several.

    Attributes:
        optimizers: as a list.
        base_lr: the first group's learning rate at the start.

    Raises:
        ValueError: there is no param group, or the first one's learning rate is not above 0.
    """

    def __init__(self, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        bases = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in self]
        if not bases:
            raise ValueError("optimizer holds no param group: there is no learning rate to set")
        self.base_lr = bases[0]
        if not self.base_lr > 0:
            raise ValueError(
                f"lr={self.base_lr} of the first param group must be above 0: the other groups' ratios refer to it"
            )
        self._ratios = [base / self.base_lr for base in bases]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def rates(self, lr: float) -> list[float]:
        """The learning rate of each group when the first one's is ``lr``, optimizer by optimizer."""
        return [lr * ratio for ratio in self._ratios]

    def set_lr(self, lr: Scalar) -> None:
        """Sets the first group's learning rate to ``lr``, [], and the others in proportion; reads no tensor that it need not."""
        for group, ratio in zip(self, self._ratios, strict=True):
            set_group_lr(group, lr * ratio)


def set_group_lr(group: dict[str, Any], lr: Scalar) -> None:
    """Sets ``group["lr"]``, [], in place where it is a tensor: compiled and captured optimizers hold that very tensor."""
    if not isinstance(group["lr"], torch.Tensor):
        group["lr"] = float(lr)
    elif isinstance(lr, torch.Tensor):
        group["lr"].copy_(lr)
    else:
        group["lr"].fill_(lr)
