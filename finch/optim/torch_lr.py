"""torch's and torchtune's schedulers, the baselines' cosine and a constant learning rate, behind the interface of FinchLR."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from finch.base.log import logger
from finch.optim.finch_lr import Decay, NonfiniteError, Scalar, check_nonfinite_options, set_group_lr


class HostSchedule:
    """Base of the schedules whose learning rate does not depend on the loss. The host counts their steps and the losses that are not finite.

    ``on_nonfinite``: ``"raise"``, or ``"skip"``, which raises after ``max_nonfinite`` in a row; ``decay``, ``total_steps``: see
    :class:`finch.optim.finch_lr.Decay`. Raises ValueError if one is out of range.
    """

    is_on_device = False  # the host has read every loss

    def __init__(self, on_nonfinite: str, max_nonfinite: int, decay: float, total_steps: int | None) -> None:
        check_nonfinite_options(on_nonfinite, max_nonfinite)
        self._decay = Decay(decay, total_steps)
        self._raises, self._max = on_nonfinite == "raise", max_nonfinite
        self._steps_taken = self._in_a_row = self._num_new = 0

    def _count(self, loss: Scalar, targets: Scalar | None) -> bool:
        """Counts a step and its loss, [] in nats; returns whether to take it: not without targets, nor where the loss is not finite.

        Raises FloatingPointError if it is not, and ``on_nonfinite`` is ``"raise"`` or the limit is reached.
        """
        step = self._steps_taken + 1
        is_taken = targets is None or float(targets) > 0
        if is_taken and math.isfinite(float(loss)):
            self._in_a_row = 0
        elif is_taken:
            self._in_a_row += 1
            self._num_new += 1
            if self._raises:
                raise NonfiniteError(f"at step {step}: lower the learning rate or check the data")
            if self._in_a_row >= self._max:
                raise NonfiniteError(
                    f"{self._in_a_row} times in a row, last at step {step}: lower the learning rate or check the data"
                )
            is_taken = False
        self._steps_taken = step
        return is_taken

    def check(self) -> int:
        """How many non-finite losses there have been since the last call."""
        num_new, self._num_new = self._num_new, 0
        return num_new

    def state_dict(self) -> dict[str, Any]:
        """The position, and the non-finite losses in a row so far, so that a resumed run gives up where the first would have."""
        return {"steps_taken": self._steps_taken, "nonfinite_in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``; further keys are ignored."""
        self._steps_taken, self._in_a_row = int(state["steps_taken"]), int(state["nonfinite_in_a_row"])


class TorchLR(HostSchedule):
    """A learning rate that depends only on the number of the step.

    Stepped like :class:`finch.FinchLR`, before the optimizer: the first ``step`` keeps the learning rate that the scheduler
    has set when it was built, each later one advances the scheduler first.

    Args:
        optimizers: those that step together; with the optimizer step inside the backward, one per parameter.
        scheduler: built on the first of them, whose learning rate the others get; None: constant.
        decay, total_steps, on_nonfinite, max_nonfinite: see :class:`HostSchedule`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | None = None,
        *,
        decay: float = 0.0,
        total_steps: int | None = None,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
    ) -> None:
        super().__init__(on_nonfinite, max_nonfinite, decay, total_steps)
        self._optimizers, self._scheduler = list(optimizers), scheduler
        self._lr = self._rate()
        self._set_lr()

    def step(self, loss: Scalar, targets: Scalar | None = None) -> bool:
        """Sets the learning rate of the current step; returns whether to take it. A batch without ``targets`` counts as a step all the same.

        Raises FloatingPointError if the loss, [] in nats, is not finite.
        """
        is_taken = self._count(loss, targets)
        if self._scheduler is not None and self._steps_taken > 1:
            self._write(self._lr)  # without the decay: some of torch's schedulers continue from the rate that they find
            self._scheduler.step()
            self._lr = self._rate()
        self._set_lr()
        return is_taken

    def metrics(self) -> dict[str, float | bool | None]:
        """The keys of :meth:`finch.FinchLR.metrics`; there is no EMA and no cap here."""
        return {"ema_loss": None, "lr": self._rate(), "lr_is_capped": False}

    def state_dict(self) -> dict[str, Any]:
        """The number of steps as plain JSON, and the learning rate, by which a config that has changed is noticed."""
        return {**super().state_dict(), "last_lr": float(self._lr)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``, also of an optimizer with another number of param groups (all have one learning rate). A scheduler that is new
        takes the steps again: each has its own position, and all else is as this config builds it."""
        super().load_state_dict(state)
        if self._scheduler is not None:
            self._write(self._lr)
            with warnings.catch_warnings(action="ignore"):  # torch's, that the optimizer has taken none
                for _ in range(self._steps_taken - 1):
                    self._scheduler.step()
            self._lr = self._rate()
            if not math.isclose(self._lr, state["last_lr"], rel_tol=1e-6):
                logger.warning(
                    f"lr_scheduler: step {self._steps_taken} had the rate {state['last_lr']:g} and has {self._lr:g} by this config, which is followed"
                )
        self._set_lr()

    def _rate(self) -> float:
        return float(self._optimizers[0].param_groups[0]["lr"])

    def _set_lr(self) -> None:
        self._write(self._decay.of(self._lr, self._steps_taken))

    def _write(self, lr: Scalar) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                set_group_lr(group, lr)


def cosine_with_warmup(
    optimizer: Optimizer,
    num_training_steps: int,
    last_epoch: int = -1,
    warmup_fraction: float = 0.05,
    num_cycles: float = 0.5,
    warmup_from_zero: bool = False,
) -> LambdaLR:
    """Linear warm-up to the optimizer's lr, then cosine decay to 0 at the end of the run.

    Args:
        num_training_steps: optimizer steps of the run.
        last_epoch: as in torch's schedulers.
        warmup_fraction: of the steps, in [0, 1), rounded to a number of steps; 0.05 for the baselines of the FINCH paper.
        num_cycles: periods of the cosine; 0.5 ends at 0.
        warmup_from_zero: whether step i of the n of the warm-up takes (i - 1) / n of the rate, as with torchtune and transformers, so that the
            first one changes nothing; else i / n.

    Raises ValueError if warmup_fraction is out of range.
    """
    if not (isinstance(warmup_fraction, (int, float)) and 0 <= warmup_fraction < 1):
        raise ValueError(f"warmup_fraction={warmup_fraction!r} must lie in [0, 1): it is a fraction of the run's steps")
    warmup = round(warmup_fraction * num_training_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + (not warmup_from_zero)) / warmup
        # Of a few steps the rounded warm-up may be all.
        progress = (step - warmup) / max(1, num_training_steps - warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))

    return LambdaLR(optimizer, factor, last_epoch)
