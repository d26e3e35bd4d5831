"""Which checkpoint a run rolls back to after a nonfinite loss or gradient, and when it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finch.checkpoint.reader import step_from_name
from finch.errors import UserError

MAX_ROLLBACKS = 10
ROLLBACK_WINDOW_STEPS = 100


class RollbackTracker:
    """The rollbacks of a run so far.

    A state that no finite step has followed may be the defect itself: the next rollback then goes further back. Until a finite step
    nothing should be saved, since that would remove good checkpoints.

    Attributes:
        unconfirmed: whether no finite step has followed the last rollback yet.
    """

    def __init__(self) -> None:
        self._count = 0  # of rollbacks, each within ROLLBACK_WINDOW_STEPS of the one before
        self._last_step = -ROLLBACK_WINDOW_STEPS
        self._unconfirmed_step: int | None = None  # of the state that the last rollback restored

    @property
    def unconfirmed(self) -> bool:
        return self._unconfirmed_step is not None

    def eligible_checkpoints(self, step: int, checkpoints: Sequence[Path]) -> list[Path]:
        """The checkpoints to try for a rollback after ``step``, in order; empty: roll back to the pretrained model. Counts a rollback.

        Args:
            checkpoints: of the run, the latest first.

        Raises:
            UserError: more than MAX_ROLLBACKS with at most ROLLBACK_WINDOW_STEPS steps between them, or no earlier checkpoint is left.
        """
        eligible = list(checkpoints)
        if self._unconfirmed_step is not None:
            eligible = [path for path in eligible if step_from_name(path) < self._unconfirmed_step]
        self._count = self._count + 1 if step - self._last_step <= ROLLBACK_WINDOW_STEPS else 1
        if self._count > MAX_ROLLBACKS or (self.unconfirmed and not eligible):
            raise UserError(
                f"a loss or gradient was not finite at step {step}, and {self._count - 1} rollbacks have not helped: lower the "
                "learning rate or check the data"
            )
        return eligible

    def record_rollback(self, step: int, restored_step: int) -> None:
        """After ``step`` the run has rolled back to the state of ``restored_step``."""
        self._last_step, self._unconfirmed_step = step, restored_step

    def record_finite(self, step: int) -> None:
        """All steps up to ``step`` since the last call were finite."""
        if step > self._last_step:
            self._unconfirmed_step = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to give up at the same step. No unconfirmed state: then nothing is saved."""
        return {"returns": self._count, "last_return": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._last_step, self._unconfirmed_step = state["returns"], state["last_return"], None
