"""What a schedule does about a loss that is not finite, where the host reads the loss at each step anyway."""

from __future__ import annotations

import math
from typing import Any


class NonfiniteCounter:
    """Counts losses that are not finite, and raises where it is asked to.

    Args:
        on_nonfinite: ``"raise"``, or ``"skip"``: count, and raise after ``max_nonfinite`` in a row.
        max_nonfinite: how many in a row ``"skip"`` bears.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(self, on_nonfinite: str = "raise", max_nonfinite: int = 10) -> None:
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite={on_nonfinite!r} must be 'raise' or 'skip'")
        if not max_nonfinite >= 1:
            raise ValueError(f"max_nonfinite={max_nonfinite} must be at least 1")
        self._raises, self._max = on_nonfinite == "raise", max_nonfinite
        self._in_a_row = 0
        self._unseen = 0

    def take(self, loss: float, step: int) -> bool:
        """
        Args:
            loss: in nats.
            step: its number, for the message.

        Returns:
            Whether it is finite.

        Raises:
            FloatingPointError: it is not, and that is not borne any more.
        """
        if math.isfinite(loss):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        self._unseen += 1
        if self._raises:
            raise FloatingPointError(
                f"the loss was not finite at step {step}: lower the learning rate or check the data"
            )
        if self._in_a_row >= self._max:
            raise FloatingPointError(
                f"the loss was not finite {self._in_a_row} times in a row, last at step {step}: lower the learning rate or check the data"
            )
        return False

    def new(self) -> int:
        """How many have come since the last call."""
        unseen, self._unseen = self._unseen, 0
        return unseen

    def state_dict(self) -> dict[str, Any]:
        return {"nonfinite_in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = int(state["nonfinite_in_a_row"])
