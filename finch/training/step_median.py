"""TALR's tau: the median of a step's sequence losses, over all of its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from finch.distributed.parallel import Parallel
from finch.objectives import Batch, Objective, median


class StepMedian:
    """Puts ``batch["statistic"]`` where an objective declares one, and does nothing otherwise.

    ``exact`` is this step's median. A step of several micro-batches then runs each forward once more, without
    gradients, since the median is needed before the first backward. ``lagged`` is the last finite median of a step
    before, and costs only the gathering of the losses; the first step has none and takes its own. Either way the host
    reads the device at each step.

    Args:
        objective: see :mod:`finch.objectives`.
        parallel: the ranks that share a step.

    Attributes:
        last: the last finite median in nats, or None; belongs in the checkpoint.
    """

    def __init__(self, objective: Objective, parallel: Parallel) -> None:
        self._objective, self._parallel = objective, parallel
        self.last: float | None = None
        self._value: float | None = None
        self._losses: list[torch.Tensor] = []

    def before_step(self, batches: Sequence[Batch], token_losses: Callable[[Batch], torch.Tensor]) -> None:
        """
        Args:
            batches: the step's micro-batches on this rank.
            token_losses: the forward, [batch, seq] in nats.
        """
        self._losses = []
        self._value = self.last if self._objective.statistic == "lagged" else None
        if self._objective.statistic is not None and self._value is None and len(batches) > 1:
            with torch.no_grad():
                losses = [self._objective.sequence_losses(token_losses(batch), batch) for batch in batches]
            self._value = self._median(losses)

    def observe(self, token_loss: torch.Tensor, batch: Batch) -> None:
        """Takes a micro-batch's losses, [batch, seq], and gives the batch its statistic."""
        if self._objective.statistic is None:
            return
        self._losses.append(self._objective.sequence_losses(token_loss, batch))
        value = self._median(self._losses) if self._value is None else self._value
        batch["statistic"] = torch.tensor(value, dtype=torch.float64)

    def after_step(self) -> None:
        """Keeps what the next step may need."""
        if self._objective.statistic == "lagged":
            value = self._median(self._losses)
            self.last = value if math.isfinite(value) else self.last

    def _median(self, losses: list[torch.Tensor]) -> float:
        shares = self._parallel.gather(torch.cat(losses).double().cpu())
        return float(median(torch.cat(shares)))
