"""The mean loss over the target tokens of an optimizer step: of all its micro-batches, on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed, nn

from finch.optim.finch_lr import FinchLR, full_value


def has_ranks() -> bool:
    """Whether this process is one of a group."""
    return distributed.is_available() and distributed.is_initialized()


def check_settings(**options: Any) -> None:
    """Raises FinchLR's errors, before there is an optimizer and the run's number of steps."""
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings(action="ignore"):
        FinchLR(unused, **{"total_steps": 1, **options})


class MeanLoss:
    """Sums losses and target tokens over micro-batches, then over the ranks of a process group.

        step_loss = MeanLoss()
        for batch in micro_batches:
            loss, num_targets = ...  # mean over the batch's target tokens, and their number
            loss.backward()
            step_loss.update(loss * num_targets, num_targets)
        if schedule.step(*step_loss.compute()):
            optimizer.step()

    Without a process group the sums are those of this process. Tensors stay on their device and are not read.

    Args:
        group: the ranks that share the step's batch; None for all of them.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group
        self._sums: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added since ``compute``."""
        return self._sums is None

    def update(self, loss_sum: torch.Tensor | float, num_targets: torch.Tensor | int) -> None:
        """Adds a micro-batch: ``loss_sum`` [] of its tokens' cross-entropies in nats, unweighted, and ``num_targets`` [] target tokens.

        Without any target ``loss_sum`` is ignored, since a mean over no tokens is NaN. Of a DTensor the full tensor is taken, a collective
        of its mesh. Raises TypeError where only one of the two is a DTensor, and a partial one: the ranks' sum and one rank's do not divide.
        """
        layouts = [each.placements for each in (loss_sum, num_targets) if hasattr(each, "placements")]
        if len(layouts) == 1 and any(placement.is_partial() for placement in layouts[0]):
            raise TypeError(
                f"MeanLoss.update(loss_sum, num_targets): one is a DTensor with placements={layouts[0]}, the other is none; pass its to_local() "
                "with this rank's part, or its full_tensor() with that of all ranks"
            )
        loss_sum, num_targets = full_value(loss_sum), full_value(num_targets)
        device = loss_sum.device if isinstance(loss_sum, torch.Tensor) else None
        dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
        targets = torch.as_tensor(num_targets, device=device, dtype=dtype).detach()
        loss = torch.as_tensor(loss_sum, device=device, dtype=dtype).detach()
        sums = torch.stack([torch.where(targets > 0, loss, 0.0), targets])
        self._sums = sums if self._sums is None else self._sums + sums

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduces the sums over the ranks, each of which must call it, and starts from zero again.

        Returns [] the mean over the target tokens in nats, NaN without any, and [] their number; the same on every rank. Raises RuntimeError
        if nothing was added.
        """
        if self._sums is None:
            raise RuntimeError("MeanLoss.compute() without update(): this step has had no micro-batch")
        sums, self._sums = self._sums, None
        if has_ranks():
            distributed.all_reduce(sums, group=self.group)
        return sums[0] / sums[1], sums[1]
