"""A run's metrics.jsonl in the dump folder, with the names of finch's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import BaseLogger

from finch.metrics import MetricsLog


class RunMetrics(BaseLogger):
    """One line a step, and everything that TorchTitan logs passed on to its own loggers.

    A step's ``grad_norm`` is known where TorchTitan logs it, and null elsewhere.

    Args:
        inner: TorchTitan's logger.
        folder: the run's.
        every: steps between two reads of the device.
    """

    def __init__(self, inner: BaseLogger, folder: Path, *, every: int) -> None:
        self._inner, self._folder = inner, folder
        self._is_writer = torch.distributed.get_rank() == 0
        world_size = torch.distributed.get_world_size()
        self.lines = MetricsLog(folder, None, is_writer=self._is_writer, every=every, world_size=world_size)
        self._last: dict[str, Any] = {}

    def open(self, first_step: int) -> None:
        """Opens the file; lines after ``first_step``, of an earlier attempt, are dropped."""
        if self._is_writer:
            self._folder.mkdir(parents=True, exist_ok=True)
        self.lines.open(first_step=first_step)

    def add_event(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes a line that is not a step's, such as the probes'."""
        self.lines.write_event({"step": step, **metrics})
        self.lines.reset_timer()

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a step after TorchTitan has logged it."""
        grad_norm = self._last.get("grad_norm") if self._last.get("step") == step else None
        self.lines.add(step, {**metrics, "grad_norm": grad_norm})

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Called by TorchTitan at the steps that it logs, and after validation."""
        if "grad_norm" in metrics:
            self._last = {"step": step, "grad_norm": metrics["grad_norm"]}
        if "validation_metrics/loss" in metrics:
            self.add_event(step, {"validation_loss": metrics["validation_metrics/loss"]})
        self._inner.log(metrics, step)

    def close(self) -> None:
        self.lines.close()
        self._inner.close()
