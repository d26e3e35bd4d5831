"""The learning rates of an earlier run, step by step: FINCH's curve without its feedback.

A schedule that reads the loss differs from a constant learning rate in two ways: its curve, and that the curve answers
to this very run. Replaying the curve of one run in another (other seed, other objective, other precision) tells them
apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from finch import run_files
from finch.optim.nonfinite import NonfiniteCounter


class ReplayLR:
    """Sets the learning rate of step i to that of step i in an earlier run's metrics.jsonl.

    Stepped like :class:`finch.FinchLR`: once per optimizer step, before the optimizer. The first param group gets the
    logged learning rate; the others keep the ratio to it that they have when this is built.

    Args:
        optimizer: one optimizer or a list of them.
        log: the earlier run's metrics.jsonl, or its folder.
        on_nonfinite, max_nonfinite: see :class:`finch.optim.nonfinite.NonfiniteCounter`.

    Attributes:
        num_steps: how many steps the log holds.

    Raises:
        ValueError: the log is missing, holds no step, leaves one out or has one without a learning rate; or the first
            param group's lr is not above 0.
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        log: str | Path,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
    ) -> None:
        self._losses = NonfiniteCounter(on_nonfinite, max_nonfinite)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        bases = [float(group["lr"]) for group in self._groups()]
        if not bases:
            raise ValueError("optimizer holds no param group: ReplayLR has no learning rate to set")
        if not bases[0] > 0:
            raise ValueError(
                f"lr={bases[0]} of the first param group must be above 0: the other groups' ratios refer to it"
            )
        self._ratios = [base / bases[0] for base in bases]
        self._log = Path(log)
        if self._log.is_dir():
            self._log = self._log / run_files.METRICS
        self._rates = _read_rates(self._log)
        self._taken = 0
        self._write()

    @property
    def num_steps(self) -> int:
        return len(self._rates)

    def check_length(self, total_steps: int) -> None:
        """For a loop that knows its length, to be asked before anything slow.

        Raises:
            ValueError: the log ends before ``total_steps``.
        """
        if total_steps > self.num_steps:
            raise ValueError(
                f"log={self._log} holds {self.num_steps} steps, the run takes {total_steps}: replay a run at least as long, or train for fewer steps"
            )

    def step(self, loss: float | torch.Tensor, targets: float | torch.Tensor | None = None) -> bool:
        """Sets the learning rate of the step at hand.

        Args:
            loss: [] mean loss in nats of the whole optimizer-step batch. Only looked at for not being finite.
            targets: [] number of target tokens behind it. A batch without any uses up its step all the same: the
                earlier run has a line for it.

        Returns:
            Whether to take the optimizer step.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: the log has no further step.
        """
        self.check_length(self._taken + 1)
        has_targets = targets is None or float(targets) > 0
        is_finite = not has_targets or self._losses.take(float(loss), self._taken + 1)
        self._taken += 1
        self._write()
        return has_targets and is_finite

    def get_last_lr(self) -> list[float]:
        """The learning rate of each param group as last set, optimizer by optimizer; before the first step, that of step 1."""
        rate = self._rates[max(self._taken - 1, 0)]
        return [rate * ratio for ratio in self._ratios]

    def metrics(self) -> dict[str, Any]:
        """The keys of :meth:`finch.FinchLR.metrics`; there is no EMA and no cap here."""
        return {"ema_loss": None, "lr": self.get_last_lr()[0], "lr_is_capped": False}

    is_on_device = False  # the host has read every loss

    def check(self) -> int:
        """How many losses have not been finite since the last call."""
        return self._losses.new()

    def state_dict(self) -> dict[str, int]:
        """Steps taken. The learning rates stay in the log, which a resumed run reads again."""
        return {"steps_taken": self._taken, **self._losses.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict`` and writes the learning rate that belongs to it.

        Raises:
            ValueError: the log holds fewer steps than have been taken.
        """
        taken = int(state["steps_taken"])
        self.check_length(taken)
        self._taken = taken
        self._losses.load_state_dict(state)
        self._write()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _write(self) -> None:
        for group, rate in zip(self._groups(), self.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # in place: compiled and captured optimizers hold this very tensor
            else:
                group["lr"] = rate


def _read_rates(log: Path) -> list[float]:
    if not log.is_file():
        raise ValueError(f"log={log} does not exist: give the metrics.jsonl of an earlier run, or its folder")
    rates: list[float] = []
    for line in run_files.read_metrics(log):
        if "validation_loss" in line or "rolled_back_to" in line:
            continue
        if line.get("step") != len(rates) + 1:
            raise ValueError(
                f"log={log} has step {line.get('step')} where step {len(rates) + 1} belongs: give the whole log of one run"
            )
        rate = line.get("lr")
        if not isinstance(rate, (int, float)) or not rate >= 0:
            raise ValueError(
                f"log={log} has lr={rate} at step {line['step']}: give the log of a run that logs its learning rate"
            )
        rates.append(float(rate))
    if not rates:
        raise ValueError(f"log={log} holds no step: give the metrics.jsonl of an earlier run, or its folder")
    return rates
