"""What a schedule does about a non-finite loss, where the host reads the loss at each step anyway."""

from __future__ import annotations

import math


class NonfiniteCounter:
    """Counts non-finite losses and raises as configured.

    Args:
        on_nonfinite: ``"raise"``, or ``"skip"``: count, and raise after ``max_nonfinite`` in a row.
        max_nonfinite: how many in a row end the run under ``"skip"``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, on_nonfinite: str = "raise", max_nonfinite: int = 10) -> None:
        check_nonfinite_options(on_nonfinite, max_nonfinite)
        self._raises, self._max = on_nonfinite == "raise", max_nonfinite
        self._in_a_row = 0
        self._num_new = 0

    def observe(self, loss: float, step: int) -> bool:
        """Counts a loss, in nats; ``step`` is its number, for the error message.

        Returns:
            Whether it is finite.

        Raises:
            FloatingPointError: it is not, and ``on_nonfinite`` is ``"raise"`` or the limit is reached.
        """
        if math.isfinite(loss):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        self._num_new += 1
        if self._raises:
            raise FloatingPointError(
                f"the loss was not finite at step {step}: lower the learning rate or check the data"
            )
        if self._in_a_row >= self._max:
            raise FloatingPointError(
                f"the loss was not finite {self._in_a_row} times in a row, last at step {step}: lower the learning rate or check the data"
            )
        return False

    def pop_new(self) -> int:
        """How many non-finite losses have come since the last call."""
        num_new, self._num_new = self._num_new, 0
        return num_new

    def state_dict(self) -> dict[str, int]:
        """The current row of non-finite losses, so that a resumed run gives up where the first would have."""
        return {"nonfinite_in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores ``state_dict``; further keys are ignored."""
        self._in_a_row = int(state["nonfinite_in_a_row"])


def check_nonfinite_options(on_nonfinite: str, max_nonfinite: int) -> None:
    """Checks the arguments that all schedules share.

    Raises:
        ValueError: one is out of range.
    """
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r} must be 'raise' or 'skip'")
    if not max_nonfinite >= 1:
        raise ValueError(f"max_nonfinite={max_nonfinite} must be at least 1")
