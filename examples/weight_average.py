"""A hook: the exponential moving average of the weights, exported next to each epoch. docs/recipe.md says how a config names it."""

from __future__ import annotations

from typing import Any

import torch

from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer


class WeightAverage(Hook):
    """average = decay * average + (1 - decay) * weight after each step, for every trained weight; writes RUN/epoch_N_average.

    The average has the shards of its weights (FSDP2, tensor parallelism): no collective is needed to update it.

    Args:
        decay: in [0, 1).
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1)")
        self._decay = decay
        self._average: dict[str, torch.Tensor] = {}

    def prepare(self, trainer: Trainer) -> None:
        self._average = {name: weight.detach().clone() for name, weight in trainer.model.trained_parameters().items()}

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @torch.no_grad()
    def after_step(self, state: TrainState) -> None:
        for name, weight in self._trainer.model.trained_parameters().items():
            self._average[name].lerp_(weight, 1 - self._decay)

    @torch.no_grad()
    def after_export(self, state: TrainState, name: str | None) -> None:
        if name is None:
            return
        self._swap()
        self._trainer.export(f"{name}_average")
        self._swap()

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    def _swap(self) -> None:
        for name, weight in self._trainer.model.trained_parameters().items():
            kept = weight.detach().clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)
