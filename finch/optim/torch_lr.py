"""Learning rates that go by the number of the step, whatever the loss: a constant one, torch's and torchtune's schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from finch.optim.nonfinite import NonfiniteCounter


class TorchLR:
    """A scheduler of torch's behind :class:`finch.FinchLR`'s interface: ``step`` comes before the optimizer, and the
    first one leaves the learning rate as the scheduler has set it.

    Args:
        optimizers: those that step together; with the optimizer inside the backward one for each parameter.
        scheduler: built on the first of them, whose learning rate the others get; None: constant.
        on_nonfinite, max_nonfinite: see :class:`finch.optim.nonfinite.NonfiniteCounter`.
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
        self._losses = NonfiniteCounter(on_nonfinite, max_nonfinite)
        self._taken = 0
        self._share()

    def step(self, loss: float | torch.Tensor, targets: float | torch.Tensor | None = None) -> bool:
        """Goes on to the learning rate of the step at hand.

        Args:
            loss: [] in nats; only looked at for not being finite.
            targets: [] number of target tokens behind it. A batch without any uses up its step all the same.

        Returns:
            Whether to take the optimizer step.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        has_targets = targets is None or float(targets) > 0
        is_finite = not has_targets or self._losses.take(float(loss), self._taken + 1)
        if self._scheduler is not None and self._taken > 0:
            self._scheduler.step()
            self._share()
        self._taken += 1
        return has_targets and is_finite

    def metrics(self) -> dict[str, Any]:
        """The keys of :meth:`finch.FinchLR.metrics`; there is no EMA and no cap here."""
        return {"ema_loss": None, "lr": self._optimizers[0].param_groups[0]["lr"], "lr_is_capped": False}

    is_on_device = False  # the host has read every loss

    def check(self) -> int:
        """How many losses have not been finite since the last call."""
        return self._losses.new()

    def state_dict(self) -> dict[str, Any]:
        """The position, and the learning rate: some of torch's schedulers go on from the last one."""
        state = {"steps_taken": self._taken, **self._losses.state_dict()}
        if self._scheduler is not None:
            whole = self._scheduler.state_dict()
            state.update({key: whole[key] for key in ("last_epoch", "_step_count")}, last_lr=whole["_last_lr"][0])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``, also of an optimizer with another number of param groups (all have one learning rate)."""
        self._taken = int(state["steps_taken"])
        self._losses.load_state_dict(state)
        if self._scheduler is not None:
            groups = self._optimizers[0].param_groups
            kept = {key: state[key] for key in ("last_epoch", "_step_count")}
            self._scheduler.load_state_dict(
                {**self._scheduler.state_dict(), **kept, "_last_lr": [state["last_lr"]] * len(groups)}
            )
            for group in groups:
                group["lr"] = state["last_lr"]
            self._share()

    def _share(self) -> None:
        for optimizer in self._optimizers[1:]:
            optimizer.param_groups[0]["lr"] = self._optimizers[0].param_groups[0]["lr"]
