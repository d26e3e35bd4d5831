"""Where a run goes back to after a loss that is not finite, and when going back is given up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finch.checkpoint.reader import step_of
from finch.errors import UserError

PRETRAINED = 0
"""In place of a checkpoint's step: the run goes back to where it began."""
MAX_ROLLBACKS = 10
ROLLBACK_WINDOW_STEPS = 100


class RollbackTracker:
    """The returns of a run to earlier states.

    A state that no finite step has followed may be what is broken: the next return goes further back. Until there is one,
    nothing should be saved, since that would drive out checkpoints that are good.

    Attributes:
        unconfirmed: whether no finite step has followed the last return yet.
    """

    def __init__(self) -> None:
        self._number = 0
        self._at = -ROLLBACK_WINDOW_STEPS
        self._to: int | None = None

    @property
    def unconfirmed(self) -> bool:
        return self._to is not None

    def candidates(self, step: int, found: Sequence[Path]) -> list[Path]:
        """The checkpoints that may be gone back to after ``step``, the first one preferred; none: the pretrained model.

        Args:
            found: those that there are, the latest first.

        Raises:
            UserError: more than ten returns with fewer than a hundred steps between them, or none is left to go to.
        """
        left = list(found) if self._to is None else [path for path in found if step_of(path) < self._to]
        self._number = self._number + 1 if step - self._at <= ROLLBACK_WINDOW_STEPS else 1
        if self._number > MAX_ROLLBACKS or (self._to is not None and not left):
            raise UserError(
                f"a loss or gradient was not finite at step {step}, and going back has not helped ({self._number - 1}x before): lower the "
                "learning rate or check the data"
            )
        return left

    def note(self, step: int, to: int) -> None:
        """The run has gone back after ``step`` to the state of step ``to``."""
        self._at, self._to = step, to

    def note_finite(self, step: int) -> None:
        """Nothing up to ``step`` was not finite, since the last time that this was asked."""
        if step > self._at:
            self._to = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to give up where it would have; saved only when nothing needs proof."""
        return {"returns": self._number, "last_return": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number, self._at, self._to = state["returns"], state["last_return"], None
