"""The memory of a real training step, from torch's CPU allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from finch_full_finetune import FinchFullFinetune

from finch.dtensor import to_local
from finch.estimate.rows import Rows

_MEASURED_STEP = 1  # from 0: the second, which has the optimizer's states


@dataclass(frozen=True)
class MeasuredStep:
    """
    Attributes:
        before: bytes of weights, buffers and optimizer states.
        peak: ``before`` and the most that the allocator gave out beyond it during the step.
        rows: of mean length.
    """

    before: int
    peak: int
    rows: Rows


@contextmanager
def measured_step() -> Iterator[list[MeasuredStep]]:
    """The list gains one entry for the recipe that runs inside."""
    train_step = FinchFullFinetune.train_step
    measured: list[MeasuredStep] = []

    def measure(recipe: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
        if recipe.state.step != _MEASURED_STEP:
            return train_step(recipe, batches)
        gc.collect()
        before = _state_bytes(recipe)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            metrics = train_step(recipe, batches)
        measured.append(MeasuredStep(before, before + _most_allocated(profile), _mean_rows(batches)))
        return metrics

    with mock.patch.object(FinchFullFinetune, "train_step", measure):
        yield measured


def _state_bytes(recipe: Any) -> int:
    states = [value for each in recipe.update.optimizers for state in each.state.values() for value in state.values()]
    values = (*recipe.model.parameters(), *recipe.model.buffers(), *states)
    return sum(
        {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in map(to_local, values)
            if isinstance(each, torch.Tensor)
        }.values()
    )


def _most_allocated(profile: Any) -> int:
    """The most bytes that were live at one time, beyond those before the profile."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def _mean_rows(batches: list[dict[str, Any]]) -> Rows:
    number = sum(len(batch["tokens"]) for batch in batches)
    targets = sum(batch["targets"].numel() for batch in batches)
    layouts = [batch.get("layout") for batch in batches]
    if any(layout is None for layout in layouts):
        return Rows(max(batch["tokens"].shape[1] for batch in batches), round(targets / number))
    # A row's last token is not computed.
    tokens = sum(len(layout.lengths) * (layout.prefix + 1) + sum(layout.lengths) for layout in layouts if layout)
    return Rows(round(tokens / number), round(targets / number))
