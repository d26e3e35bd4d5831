"""The paper's rule for SFT with a small learning rate: the largest rate of a grid that forgets less than 2 points on average."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch.base import run_files
from finch.base.errors import UserError
from finch.evaluation.results import OLD, POINTS, Sample, base_path, read_result, read_results, read_samples
from finch.study.sweep.grid import LABEL, LR, METHOD, SEED, read_cell

MAX_FORGETTING = 2.0
"""Points of average forgetting that the paper allows, on validation rows."""
SPLIT_SEED = 0
"""Of the halves of each old task's documents, as the old tasks have no validation rows: one chooses the rate, the other says what it forgets."""


@dataclass(frozen=True)
class Forgetting:
    """Points that were lost: the mean over old tasks and seeds of (pretrained - tuned); negative where the runs gained.

    Attributes:
        low, high: 95% interval over documents, with SE = sqrt(sum of the tasks' SE^2) / number of tasks; seeds are not drawn.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Rate:
    """Runs that differ only in their seed.

    Attributes:
        lr: their ``optimizer.lr``.
        values: their other values, without method, label, learning rate and seed.
        runs: their folders, in the order of their seeds.
        forgetting: on the half of each old task's documents that chooses.
        reported: on the other half, which has no part in the choice.
    """

    lr: float
    values: Mapping[str, Any]
    runs: tuple[Path, ...]
    forgetting: Forgetting
    reported: Forgetting


def forgetting_of(runs: Mapping[Path, Sequence[tuple[str, str, float]]]) -> tuple[Forgetting, Forgetting]:
    """The mean forgetting of runs, on the documents that choose a rate and on the others. Each task of role ``old`` in points counts equally.

    Args:
        runs: of each its :func:`_lost_points`.

    Raises:
        UserError: a task has too few documents for two halves.
    """
    tasks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for lost in runs.values():
        for task, document, points in lost:
            tasks[task][document].append(points)
    choosing, reported = [], []
    for task, documents in tasks.items():
        halves: tuple[list[float], list[float]] = ([], [])
        for document, points_of_runs in documents.items():
            halves[_is_reported(task, document)].append(statistics.fmean(points_of_runs))
        if min(map(len, halves)) < 2:
            raise UserError(
                f"{next(iter(runs))}: {task} has {len(documents)} documents, too few for two halves; evaluate more: evaluate.limit"
            )
        choosing.append(halves[False])
        reported.append(halves[True])
    return _mean(choosing), _mean(reported)


def _lost_points(run: Path) -> Iterator[tuple[str, str, float]]:
    """Old task, key of a document, which those of one cluster share, and what it lost."""
    is_evaluated = False
    folder = run / run_files.EVALUATION
    for suite, tuned in read_results(folder).items():
        old = {name: task for name, task in tuned.tasks.items() if task.role == OLD and task.unit == POINTS}
        path = base_path(folder / f"{suite}.json", tuned) if old else None
        base = None if path is None else read_result(path)
        for name, task in old.items():
            if path is None or base is None or name not in base.tasks:
                raise UserError(
                    f"{run}: {name} has no score of the pretrained model; evaluate again with finch evaluate"
                )
            before = {_key(sample): sample["score"] for sample in read_samples(path.parent, base.tasks[name])}
            sign = 100 if task.is_higher_better else -100
            for sample in read_samples(folder, task):
                score = before.get(_key(sample))
                if sample["score"] is not None and score is not None:
                    document = _key(sample) if sample.get("cluster") is None else f"cluster {sample['cluster']}"
                    yield name, document, sign * (score - sample["score"])
            is_evaluated = True
    if not is_evaluated:
        raise UserError(
            f"{run} has no results on tasks that measure forgetting; evaluate it: finch evaluate --suite forgetting"
        )


def _key(sample: Sample) -> str:
    return f"{sample['doc_id']} {sample['doc_hash']}"


def _is_reported(task: str, document: str) -> bool:
    return bool(hashlib.sha256(f"{SPLIT_SEED}\n{task}\n{document}".encode()).digest()[0] % 2)


def _mean(tasks: Sequence[Sequence[float]]) -> Forgetting:
    mean = statistics.fmean(map(statistics.fmean, tasks))
    errors = (statistics.variance(task) / len(task) for task in tasks)
    margin = statistics.NormalDist().inv_cdf(0.975) * math.sqrt(sum(errors)) / len(tasks)
    return Forgetting(mean, mean - margin, mean + margin)


def rates_of(runs: Sequence[Path], method: str) -> list[Rate]:
    """The rates of a method's runs, the smallest first; runs that differ only in their seed are averaged.

    Args:
        method: of runs without a label, or a label.

    Raises:
        UserError: no run of the method has a learning rate of the grid; a run is not evaluated.
    """
    groups: dict[str, list[tuple[dict[str, Any], Path]]] = defaultdict(list)
    lost: dict[Path, list[tuple[str, str, float]]] = {}
    measured: dict[frozenset[str], Path] = {}
    for run in runs:
        values = read_cell(run)["values"]
        if values.get(LABEL, values.get(METHOD, "sft")) == method and LR in values:
            other = {key: value for key, value in values.items() if key not in (METHOD, LABEL, SEED)}
            groups[repr(sorted(other.items()))].append((values, run))
            lost[run] = list(_lost_points(run))
            measured.setdefault(frozenset(task for task, *_ in lost[run]), run)
    if not groups:
        raise UserError(
            f"--method {method}: no run has this method or label and a value of {LR}; run finch sweep first"
        )
    if len(measured) > 1:
        (some, run), (others, other_run) = list(measured.items())[:2]
        lacking, names = (other_run, some - others) if some - others else (run, others - some)
        raise UserError(
            f"{lacking} has no result of {', '.join(sorted(names))}, by which other rates are compared; evaluate it: finch sweep goes on with it"
        )
    rates = []
    for group in groups.values():
        group.sort(key=lambda each: (str(type(each[0].get(SEED))), each[0].get(SEED) or 0))
        values = {key: value for key, value in group[0][0].items() if key not in (METHOD, LABEL, LR, SEED)}
        folders = tuple(run for _, run in group)
        rates.append(Rate(float(group[0][0][LR]), values, folders, *forgetting_of({run: lost[run] for run in folders})))
    return sorted(rates, key=lambda rate: (rate.lr, -rate.forgetting.mean))


def select_rate(rates: Sequence[Rate], max_forgetting: float) -> Rate | None:
    """The largest rate that forgets less than ``max_forgetting`` points; of equal rates the one that forgets least."""
    allowed = [rate for rate in rates if rate.forgetting.mean < max_forgetting]
    return max(allowed, key=lambda rate: (rate.lr, -rate.forgetting.mean), default=None)


def table(rates: Sequence[Rate]) -> list[dict[str, str]]:
    """A row for each rate, with 95% intervals."""
    return [
        {
            "optimizer.lr": f"{rate.lr:g}",
            "forgetting": str(rate.forgetting),
            "on the other half": str(rate.reported),
            "runs": str(len(rate.runs)),
            "other values": ", ".join(f"{key}={value}" for key, value in rate.values.items()),
        }
        for rate in rates
    ]


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
