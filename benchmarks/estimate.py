"""The peak memory of a real training step on the CPU against `finch check --exact`, on one process or several:

python -m benchmarks.estimate smollm2/135M_finch model_dir=DIR ...
torchrun --nproc_per_node 2 -m benchmarks.estimate stories260k/tofu_finch data_root=DATA

Trains two steps. The second one is compared, which has the optimizer's states.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from finch_full_finetune import FinchFullFinetune

from finch.base.dtensor import to_local
from finch.base.errors import report_user_errors
from finch.cli.early_checks import read_job
from finch.config.methods import LORA_RECIPE
from finch.distributed.parallel import launched_rank, launched_ranks
from finch.plan.estimate.fake_step import estimate_step
from finch.plan.estimate.formula import Rows
from finch.training.run import run_recipe


class MeasuredStep(NamedTuple):
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
        if recipe.state.step != 1:
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
    tensors = map(to_local, (*recipe.model.parameters(), *recipe.model.buffers(), *states))
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _most_allocated(profile: Any) -> int:
    """The most bytes that were live at one time, beyond those before the profile."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def _mean_rows(batches: list[dict[str, Any]]) -> Rows:
    number = sum(len(batch["tokens"]) for batch in batches)
    targets = sum(batch["targets"].numel() for batch in batches)
    layouts = [batch.get("layout") for batch in batches]
    if any(layout is None for layout in layouts):
        return Rows(max(batch["tokens"].shape[1] for batch in batches), round(targets / number))
    # A row's last token is not computed.
    tokens = sum(len(layout.lengths) * (layout.prefix + 1) + sum(layout.lengths) for layout in layouts if layout)
    return Rows(round(tokens / number), round(targets / number))


@report_user_errors
def main() -> None:
    config, *overrides = sys.argv[1:]
    ranks = launched_ranks()
    output = f"output_dir={tempfile.gettempdir()}/finch_estimate"
    fixed = ["max_steps_per_epoch=2", "epochs=1", "lr_scheduler=null", output, "overwrite=True"]
    recipe, cfg = read_job(config, [*fixed, *overrides], is_here=False)
    name = "FinchLoRAFinetune" if recipe == LORA_RECIPE else "FinchFullFinetune"
    with measured_step() as measured:
        run_recipe(getattr(importlib.import_module(recipe), name), cfg)
    if launched_rank():
        return
    (real,) = measured
    step = estimate_step(recipe, cfg, ranks=ranks, rows=real.rows)
    print(f"{config} {' '.join(overrides)}, {ranks} rank(s), {real.rows}")
    for title, estimated, value in (
        ("before the step", sum(step.between_steps.values()), real.before),
        ("peak", step.peak, real.peak),
    ):
        print(
            f"{title}: measured {value / 1e6:.2f} MB, estimated {estimated / 1e6:.2f} MB, ratio {estimated / value:.4f}"
        )


if __name__ == "__main__":
    main()
