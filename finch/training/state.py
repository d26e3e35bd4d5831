"""What a checkpoint holds: tensors of model and optimizer, and the scalars of a run as plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from finch.checkpoint.reader import FORMAT, load_tensors, read_state
from finch.distributed.parallel import Parallel
from finch.optim.finch_lr import FinchLR
from finch.training.chunked_loss import TokenLoss
from finch.training.lr_scheduler import Schedule
from finch.training.rollback import RollbackTracker
from finch.training.step_median import StepMedian


@dataclass
class TrainState:
    """
    Attributes:
        identity: what may not change when the run is resumed, see :mod:`finch.training.identity`.
        step, epoch: optimizer steps so far; the epoch at hand, from 0.
        consumed: samples of this epoch; with the epoch it is the complete position in the data, on any number of ranks.
        best: ``{"epoch": name, "validation_loss": nats}`` of the best epoch, or None.
    """

    model: TokenLoss
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    median: StepMedian
    seed: int
    identity: dict[str, Any]
    step: int = 0
    epoch: int = 0
    consumed: int = 0
    best: dict[str, Any] | None = None
    rollbacks: RollbackTracker = field(default_factory=RollbackTracker)

    def __post_init__(self) -> None:
        self._initial_schedule = self.schedule.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The scalars. The number of ranks is added by the writer; random states are files of their own."""
        return {
            "format": FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "best": self.best,
            "schedule": self.schedule.state_dict(),
            "median": self.median.last,
            **self.rollbacks.state_dict(),
            "identity": self.identity,
        }

    def load(self, folder: Path, scalars: dict[str, Any], parallel: Parallel) -> None:
        """Resumes from a checkpoint; a collective. Base learning rates stay the config's.

        Raises:
            UserError: the checkpoint does not hold what this model and optimizer need.
        """
        load_tensors(folder, self.model, self.optimizers, parallel)
        self.step, self.epoch, self.consumed = scalars["step"], scalars["epoch"], scalars["consumed"]
        self.best, self.median.last = scalars["best"], scalars["median"]
        self.rollbacks.load_state_dict(scalars)
        self.schedule.load_state_dict(scalars["schedule"])

    def roll_back(self, folder: Path | None, parallel: Parallel, load_pretrained: Callable[[], None]) -> int:
        """Restores weights, optimizer and schedule, but not the position; a collective.

        Args:
            folder: a checkpoint; None: the start of the run.
            load_pretrained: loads the pretrained weights.

        Returns:
            The step whose weights the run now has; 0 at the start.
        """
        if folder is None:
            load_pretrained()
            for optimizer in self.optimizers:
                optimizer.state.clear()
            scalars: dict[str, Any] = {"step": 0, "schedule": self._initial_schedule, "median": None}
        else:
            load_tensors(folder, self.model, self.optimizers, parallel)
            scalars = read_state(folder)
        self.median.last = scalars["median"]
        if isinstance(self.schedule, FinchLR):  # the others depend on the step alone
            self.schedule.load_state_dict(scalars["schedule"])
        return scalars["step"]
