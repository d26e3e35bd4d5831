"""The peak memory of a real training step, from the allocator."""

from __future__ import annotations

import gc

import finch_full_finetune
import torch

from finch.dtensor import to_local
from helpers.runs import run_here


def _allocated(profile) -> int:
    """The most bytes that were live at one time, beyond those before the profile."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure_step(monkeypatch, folder, config, *overrides, recipe="finch_full_finetune"):
    """Runs the recipe; (bytes before the second step, the most in it, its micro-batches)."""
    train_step = finch_full_finetune.FinchFullFinetune._train_step
    measured = []

    def measure(self, batches):
        if self.state.step != 1:
            train_step(self, batches)
            return
        gc.collect()
        states = [value for each in self._optimizers for state in each.state.values() for value in state.values()]
        tensors = [*self._model.parameters(), *self._model.buffers(), *states]
        tensors += [theta for _, theta in getattr(self._regularizer, "_pretrained", [])]
        storages = {to_local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)}
        before = sum(storage.nbytes() for storage in storages)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            train_step(self, batches)
        measured.append((before, before + _allocated(profile), batches))

    with monkeypatch.context() as patch:
        patch.setattr(finch_full_finetune.FinchFullFinetune, "_train_step", measure)
        run = run_here(folder, config, *overrides, recipe=recipe)
    assert run.returncode == 0, run.output[-3000:]
    return measured[0]
