"""A hook that breaks a step of the last rank: `hooks.acting._component_=helpers.acting_hook.ActingHook`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from finch.training.hooks import Hook
from helpers.acting_rows import wait_for_a_dead_disk


class ActingHook(Hook):
    """``action``: a signal that the rank gets, "hang", or "nan" for its weights; ``once``: a file that exists once it has acted; "": it always does."""

    def __init__(self, step: int, action: str, once: str = "") -> None:
        self.step, self.action, self.once = step, action, once

    def start(self, trainer: Any) -> None:
        self.model, self.is_on_last_rank = trainer.model, trainer.parallel.rank == trainer.parallel.world_size - 1

    def before_step(self, state: Any) -> None:
        if state.step + 1 != self.step or not self.is_on_last_rank or (self.once and Path(self.once).exists()):
            return
        if self.once:
            Path(self.once).touch()
        if self.action == "hang":
            wait_for_a_dead_disk()
        elif self.action == "nan":
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)
        else:
            os.kill(os.getpid(), signal.Signals[self.action])
