"""The learning rates of an earlier run, step by step: FINCH's curve without its feedback.

A schedule that reads the loss differs from a constant learning rate in two ways: its curve, and its response to this very
run. Replaying the curve of one run in another (other seed, other objective, other precision) separates the two. A straight line
between its ends, and a constant at its mean, are controls without the curve.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from finch.base import run_files
from finch.optim.finch_lr import ParamGroups, Scalar
from finch.optim.torch_lr import HostSchedule

SHAPES = ("curve", "linear", "mean")


class ReplayLR(HostSchedule):
    """Sets the learning rate of step i to that of step i in an earlier run's metrics.jsonl, or to a control made of that log.

    Stepped like :class:`finch.FinchLR`: once per optimizer step, before the optimizer. The first param group gets the
    logged learning rate; the others keep the ratio to it that they have when this is built.

    Args:
        log: the earlier run's metrics.jsonl, or its folder.
        shape: ``"curve"``: the logged learning rates. ``"linear"``: the straight line from the log's first learning rate to its
            last one. ``"mean"``: the constant mean of the log's learning rates. The last two are of the complete log, also where
            it is longer than the run.
        decay, total_steps, on_nonfinite, max_nonfinite: see :class:`finch.optim.torch_lr.HostSchedule`.

    Raises ValueError for an unknown shape, a log that is missing, has no step or a step without a learning rate, and a first param group whose
    lr is not above 0.
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        log: str | Path,
        shape: str = "curve",
        decay: float = 0.0,
        total_steps: int | None = None,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
    ) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape={shape!r} must be one of {', '.join(SHAPES)}")
        super().__init__(on_nonfinite, max_nonfinite, decay, total_steps)
        self._groups = ParamGroups(optimizer)
        self.optimizers = self._groups.optimizers
        self._log = Path(log)
        if self._log.is_dir():
            self._log = self._log / run_files.METRICS
        self._rates = _with_shape(_read_rates(self._log), shape)
        self._set_lr()

    @property
    def num_steps(self) -> int:
        """How many steps the log holds."""
        return len(self._rates)

    def check_length(self, total_steps: int) -> None:
        """Call it before training, where the number of steps is known. Raises ValueError if the log ends before ``total_steps``."""
        if total_steps > self.num_steps:
            raise ValueError(
                f"log={self._log} holds {self.num_steps} steps, the run takes {total_steps}: replay a run at least as long, or train for fewer steps"
            )

    def step(self, loss: Scalar, targets: Scalar | None = None) -> bool:
        """Sets the learning rate of the current step; returns whether to take it.

        Args:
            loss: [] mean loss in nats of the complete optimizer-step batch; only checked for being finite.
            targets: [] number of target tokens behind it. A batch without any counts as a step all the same: the
                earlier run has a line for it.

        Raises FloatingPointError if the loss is not finite, ValueError if the log has no further step.
        """
        # First, so that the error leaves the count where the last step put it.
        self.check_length(self._steps_taken + 1)
        is_taken = self._count(loss, targets)
        self._set_lr()
        return is_taken

    def get_last_lr(self) -> list[float]:
        """The learning rate of each param group as last set, optimizer by optimizer; before the first step, that of step 1."""
        return self._groups.rates(self._lr)

    def metrics(self) -> dict[str, float | bool | None]:
        """The keys of :meth:`finch.FinchLR.metrics`; there is no EMA and no cap here."""
        return {"ema_loss": None, "lr": self._lr, "lr_is_capped": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict`` and sets the learning rate that belongs to it, read from the log again. Raises ValueError if the log
        holds fewer steps than ``state``."""
        self.check_length(int(state["steps_taken"]))
        super().load_state_dict(state)
        self._set_lr()

    @property
    def _lr(self) -> float:
        """The first group's learning rate: the last step's; before the first step, that of step 1."""
        return float(self._decay.of(self._rates[max(self._steps_taken - 1, 0)], self._steps_taken))

    def _set_lr(self) -> None:
        self._groups.set_lr(self._lr)


def _with_shape(rates: list[float], shape: str) -> list[float]:
    if shape == "linear":
        first, last, intervals = rates[0], rates[-1], max(len(rates) - 1, 1)
        # Weighted, so that both ends are the log's numbers exactly; first + 1 * (last - first) may round.
        return [first * (1 - step / intervals) + last * (step / intervals) for step in range(len(rates))]
    return [statistics.fmean(rates)] * len(rates) if shape == "mean" else rates


def _read_rates(log: Path) -> list[float]:
    if not log.is_file():
        raise ValueError(f"log={log} does not exist: give the metrics.jsonl of an earlier run, or its folder")
    rates: list[float] = []
    for line in run_files.read_metrics(log):
        if run_files.is_event(line):
            continue
        if line.get("step") != len(rates) + 1:
            raise ValueError(
                f"log={log} has step {line.get('step')} where step {len(rates) + 1} belongs: give the complete log of one run"
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
