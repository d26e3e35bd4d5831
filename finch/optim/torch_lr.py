"""torch's and torchtune's schedulers, and a constant learning rate, behind the interface of FinchLR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from finch.optim.nonfinite_counter import NonfiniteCounter
from finch.optim.param_groups import Scalar, set_group_lr


class TorchLR:
    """A learning rate that depends on the number of the step alone.

    Stepped like :class:`finch.FinchLR`, before the optimizer: the first ``step`` keeps the learning rate that the scheduler
    has set when it was built, each later one advances the scheduler first.

    Args:
        optimizers: those that step together; with the optimizer step inside the backward, one for each parameter.
        scheduler: built on the first of them, whose learning rate the others get; None: constant.
        on_nonfinite, max_nonfinite: see :class:`finch.optim.nonfinite_counter.NonfiniteCounter`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | None = None,
        *,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
    ) -> None:
        self._optimizers, self._scheduler = list(optimizers), scheduler
        self._nonfinite = NonfiniteCounter(on_nonfinite, max_nonfinite)
        self._steps_taken = 0
        self._copy_lr()

    def step(self, loss: Scalar, targets: Scalar | None = None) -> bool:
        """Sets the learning rate of the current step.

        Args:
            loss: [] in nats; only checked for being finite.
            targets: [] number of target tokens behind it. A batch without any counts as a step all the same.

        Returns:
            Whether to take the optimizer step.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        has_targets = targets is None or float(targets) > 0
        is_finite = not has_targets or self._nonfinite.observe(float(loss), self._steps_taken + 1)
        if self._scheduler is not None and self._steps_taken > 0:
            self._scheduler.step()
            self._copy_lr()
        self._steps_taken += 1
        return has_targets and is_finite

    def metrics(self) -> dict[str, float | bool | None]:
        """The keys of :meth:`finch.FinchLR.metrics`; there is no EMA and no cap here."""
        return {"ema_loss": None, "lr": float(self._optimizers[0].param_groups[0]["lr"]), "lr_is_capped": False}

    is_on_device = False  # the host has read every loss

    def check(self) -> int:
        """How many non-finite losses there have been since the last call."""
        return self._nonfinite.pop_new()

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers, and the learning rate: some of torch's schedulers continue from the last one."""
        state: dict[str, Any] = {"steps_taken": self._steps_taken, **self._nonfinite.state_dict()}
        if self._scheduler is not None:
            full = self._scheduler.state_dict()
            state.update({key: full[key] for key in ("last_epoch", "_step_count")}, last_lr=float(full["_last_lr"][0]))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``, also of an optimizer with another number of param groups (all have one learning rate)."""
        self._steps_taken = int(state["steps_taken"])
        self._nonfinite.load_state_dict(state)
        if self._scheduler is not None:
            groups = self._optimizers[0].param_groups
            position = {key: state[key] for key in ("last_epoch", "_step_count")}
            self._scheduler.load_state_dict(
                {**self._scheduler.state_dict(), **position, "_last_lr": [state["last_lr"]] * len(groups)}
            )
            for group in groups:
                set_group_lr(group, state["last_lr"])
            self._copy_lr()

    def _copy_lr(self) -> None:
        for optimizer in self._optimizers[1:]:
            set_group_lr(optimizer.param_groups[0], self._optimizers[0].param_groups[0]["lr"])
