"""TALR's tau: the median of a step's sequence losses, over all of its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from finch.distributed.parallel import Parallel
from finch.objectives import Batch, Objective, median


class StepMedian:
    """Puts the step's median into ``batch["statistic"]`` where the objective declares one; does nothing otherwise.

    ``exact`` is this step's median. With several micro-batches each forward then runs a second time, without gradients,
    since the median is needed before the first backward. ``lagged`` is the last finite median of an earlier step and
    costs one gathering of the losses; the first step has none and uses its own. Either way the host reads the device at
    each step.

    Args:
        objective: its ``statistic`` selects the mode, see :class:`finch.objectives.Objective`.
        parallel: the ranks that share a step.
        micro_batches: of a step on one rank; with one, ``auto`` is exact.
        resumed: the scalars of the checkpoint that the run resumes from; ``auto`` then stays what it was.

    Attributes:
        last: the last finite median in nats, or None; part of the checkpoint.
        mode: None, ``"exact"`` or ``"lagged"``.
    """

    def __init__(
        self,
        objective: Objective,
        parallel: Parallel,
        micro_batches: int = 1,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        self._objective, self._parallel = objective, parallel
        self.mode = objective.statistic
        if self.mode == "auto":
            is_exact = micro_batches == 1 if resumed is None else resumed["median"] is None
            self.mode = "exact" if is_exact else "lagged"
        self.last: float | None = None
        self._value: float | None = None
        self._used: float | None = None
        self._losses: list[torch.Tensor] = []

    def before_step(self, batches: Sequence[Batch], token_losses: Callable[[Batch], torch.Tensor]) -> None:
        """Computes the median before the first backward, where the objective needs it then.

        Args:
            batches: the step's micro-batches on this rank.
            token_losses: the forward, [batch, seq] in nats.
        """
        self._losses = []
        self._value = self.last if self.mode == "lagged" else None
        if self.mode is not None and self._value is None and len(batches) > 1:
            with torch.no_grad():
                losses = [self._objective.sequence_losses(token_losses(batch), batch) for batch in batches]
            self._value = self._median(losses)

    def add_to(self, batch: Batch) -> bool:
        """Sets ``batch["statistic"]`` where it is known before the forward pass. Returns whether the objective then has all it needs."""
        if self._value is not None:
            batch["statistic"] = torch.tensor(self._value, dtype=torch.float64)
        return self.mode is None or self._value is not None

    def observe(self, token_loss: torch.Tensor, batch: Batch) -> None:
        """Records a micro-batch's losses, [batch, seq] in nats, and sets ``batch["statistic"]``, [] in nats."""
        if self.mode is None:
            return
        self._losses.append(self._objective.sequence_losses(token_loss, batch))
        self._used = self._median(self._losses) if self._value is None else self._value
        batch["statistic"] = torch.tensor(self._used, dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """What a training log holds of a step: the median that its weights used, ``tau`` in nats."""
        return {} if self._used is None else {"tau": self._used}

    def after_step(self) -> None:
        """Updates ``last``."""
        if self.mode == "lagged":
            value = self._median(self._losses)
            self.last = value if math.isfinite(value) else self.last

    def _median(self, losses: list[torch.Tensor]) -> float:
        losses_of_ranks = self._parallel.gather(torch.cat(losses).double().cpu())
        return float(median(torch.cat(losses_of_ranks)))
