"""The paper's rule for SFT with a small learning rate: the largest rate of a grid that forgets less than 2 points on average."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch import run_files
from finch.errors import UserError
from finch.evaluation.results import OLD, base_path, read_result, read_results
from finch.sweep.grid import LABEL, LR, METHOD, SEED, read_cell

MAX_FORGETTING = 2.0
"""Points of average forgetting that the paper allows."""


@dataclass(frozen=True)
class Rate:
    """Runs that differ only in their seed.

    Attributes:
        lr: their ``optimizer.lr``.
        values: their other values, without method, label, learning rate and seed.
        runs: their folders, in the order of their seeds.
        forgetting: points, the mean over old tasks and seeds of (pretrained - tuned); negative where the runs gained.
    """

    lr: float
    values: Mapping[str, Any]
    runs: tuple[Path, ...]
    forgetting: float


def forgetting_of(run: Path) -> float:
    """The average forgetting of a run in points: the mean over its tasks of role ``old`` of 100 x (pretrained score - tuned score).

    Raises:
        UserError: the run has no result of such a task, or the pretrained model's is missing.
    """
    changes = []
    for suite, tuned in read_results(run / run_files.EVALUATION).items():
        old = {name: task for name, task in tuned.tasks.items() if task.role == OLD}
        if not old:
            continue
        path = base_path(run / run_files.EVALUATION / f"{suite}.json", tuned)
        base = None if path is None else read_result(path)
        for name, task in old.items():
            before = None if base is None or name not in base.tasks else base.tasks[name].score
            if before is None or task.score is None:
                raise UserError(
                    f"{run}: {name} has no score of the pretrained or of the tuned model; evaluate again with finch evaluate"
                )
            sign = 1 if task.is_higher_better else -1
            changes.append(100 * sign * (before - task.score))
    if not changes:
        raise UserError(
            f"{run} has no results on tasks that measure forgetting; evaluate it: finch evaluate --suite forgetting"
        )
    return statistics.fmean(changes)


def rates_of(runs: Sequence[Path], method: str) -> list[Rate]:
    """The rates of a method's runs, the smallest first; runs that differ only in their seed are averaged.

    Args:
        method: of runs without a label, or a label.

    Raises:
        UserError: no run of the method has a learning rate of the grid; a run is not evaluated.
    """
    groups: dict[str, list[tuple[dict[str, Any], Path]]] = defaultdict(list)
    for run in runs:
        values = read_cell(run)["values"]
        if values.get(LABEL, values.get(METHOD, "sft")) == method and LR in values:
            other = {key: value for key, value in values.items() if key not in (METHOD, LABEL, SEED)}
            groups[repr(sorted(other.items()))].append((values, run))
    if not groups:
        raise UserError(
            f"--method {method}: no run has this method or label and a value of {LR}; run finch sweep first"
        )
    rates = []
    for group in groups.values():
        group.sort(key=lambda each: (str(type(each[0].get(SEED))), each[0].get(SEED) or 0))
        values = {key: value for key, value in group[0][0].items() if key not in (METHOD, LABEL, LR, SEED)}
        folders = tuple(run for _, run in group)
        mean = statistics.fmean(forgetting_of(run) for run in folders)
        rates.append(Rate(float(group[0][0][LR]), values, folders, mean))
    return sorted(rates, key=lambda rate: (rate.lr, -rate.forgetting))


def select_rate(rates: Sequence[Rate], max_forgetting: float) -> Rate | None:
    """The largest rate that forgets less than ``max_forgetting`` points; of equal rates the one that forgets least."""
    allowed = [rate for rate in rates if rate.forgetting < max_forgetting]
    return max(allowed, key=lambda rate: (rate.lr, -rate.forgetting), default=None)


def sweep_runs(out: Path) -> list[Path]:
    """The cells' folders in a sweep's folder that are evaluated.

    Raises:
        UserError: there are none.
    """
    runs = sorted(path.parent for path in out.glob(f"*/{run_files.CELL}"))
    if not runs:
        raise UserError(f"{out} holds no runs of a sweep; give the folder `out` of a grid that finch sweep has run")
    evaluated = [run for run in runs if any((run / run_files.EVALUATION).glob("*.json"))]
    if not evaluated:
        raise UserError(f"{out}: no run is evaluated; give the grid the block evaluate with suites: [forgetting]")
    return evaluated
