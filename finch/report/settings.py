"""Settings: runs that differ in nothing but their seed, and their place in the trade-off between the new task and the old ones.

Intervals come from one bootstrap of everything at once. A draw takes documents of each task, and seeds, with replacement, the same ones for
all runs and the pretrained model: differences between runs are paired.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finch.errors import UserError
from finch.evaluation.results import POINTS, Sample
from finch.report.measures import Comparison, Estimate, Outcome
from finch.report.runs import LABEL, METHOD, SEED
from finch.report.selection import Measure

RESAMPLES = 2_000
FOLDER = "folder"
"""Key of the value that is added to settings which are otherwise equal: the name of the run's folder."""
MIN_SEEDS = 5
"""For an interval over seeds alone: of two or three, the bootstrap's interval is their range."""
_CHUNK = 200  # draws at a time

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone.

    Attributes:
        method: of all of them.
        values: what they share, such as optimizer.lr.
        runs: their positions in the comparison.
    """

    method: str
    values: Mapping[str, Any]
    runs: Sequence[int]


@dataclass(frozen=True)
class Point:
    """A setting in the trade-off, mean over its seeds, in units where more is better: percent and points, or minus nats a token.

    Attributes:
        setting: None for the pretrained model.
        new: score on the new task.
        old: mean change of the old tasks.
        new_draws, old_draws: the same of each draw of the bootstrap, [draws].
        tasks: the change of each old task, by name; of those that are not the trade-off's where all its runs have one.
    """

    setting: Setting | None
    new: Estimate
    old: Estimate
    new_draws: Array
    old_draws: Array
    tasks: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class TradeOff:
    """All settings that have the new task and the old ones.

    Attributes:
        points: one a setting.
        base: the pretrained model; None where its score on the new task was not measured.
        runs: (setting's position, new, old) of each run.
        has_intervals: False where there are neither documents to draw nor ``MIN_SEEDS`` seeds.
        drawn: what intervals are over.
    """

    points: Sequence[Point]
    base: Point | None
    runs: Sequence[tuple[int, float, float]]
    has_intervals: bool
    drawn: str = "documents and seeds"


def group_settings(comparison: Comparison) -> list[Setting]:
    """In the order of the runs. Runs with the same values and the same seed differ in something else: each is a setting of its own."""
    groups: dict[Hashable, list[int]] = {}
    for number, run in enumerate(comparison.runs):
        values = _without_seed(run.values)
        groups.setdefault(tuple(sorted((key, str(value)) for key, value in values.items())), []).append(number)
    settings = []
    for numbers in groups.values():
        runs = [comparison.runs[number] for number in numbers]
        values = {key: value for key, value in _without_seed(runs[0].values).items() if key not in (METHOD, LABEL)}
        if len({run.seed for run in runs}) == len(runs):
            settings.append(Setting(runs[0].method, values, numbers))
        else:
            settings += [
                Setting(run.method, {**values, FOLDER: run.folder.name}, [number])
                for number, run in zip(numbers, runs, strict=True)
            ]
    return settings


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Also without the seed of the run that a cell of a sweep replays."""
    return {
        key: _without_seed(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != SEED
    }


def trade_off(comparison: Comparison, settings: Sequence[Setting]) -> TradeOff:
    """
    Raises:
        UserError: two runs were evaluated on different documents of a task.
    """
    numbers = [number for setting in settings for number in setting.runs if comparison.is_complete(number)]
    if comparison.new is None or not numbers:
        return TradeOff([], None, [], False)
    column = {number: index for index, number in enumerate(numbers)}
    names = [str(comparison.runs[number].folder) for number in numbers]
    first = comparison.outcomes[numbers[0]][comparison.new.name]
    outcomes = [comparison.outcomes[number][comparison.new.name] for number in numbers]
    # [runs + base] and [draws, runs + base]
    new, new_draws = _scores(comparison.new, outcomes, names)
    # A share, as accuracies are, stays one when the weights of the seeds are stretched.
    limits = _share_limits(comparison.new, new)
    others = [one for one in comparison.other_old if all(comparison.has_change(number, one) for number in numbers)]
    tasks = [*comparison.old, *others]
    per_task = [
        _deltas(measure, [comparison.outcomes[number][measure.name] for number in numbers], names) for measure in tasks
    ]
    old = np.mean([values for values, _ in per_task[: len(comparison.old)]], axis=0)
    old_draws = np.mean([draws for _, draws in per_task[: len(comparison.old)]], axis=0)
    seeds = sorted({str(comparison.runs[number].seed) for number in numbers})
    counts = np.random.default_rng(0).multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=RESAMPLES)
    kept = [(one, [number for number in one.runs if number in column]) for one in settings]
    kept = [(setting, members) for setting, members in kept if members]
    are_probes = all(measure.is_probe for measure in comparison.old)
    has_intervals = not are_probes or min(len(members) for _, members in kept) >= MIN_SEEDS
    points = []
    for setting, members in kept:
        columns = [column[number] for number in members]
        weights = counts[:, [seeds.index(str(comparison.runs[number].seed)) for number in members]].astype(float)
        weights[weights.sum(axis=1) == 0] = 1  # a draw without any of this setting's seeds
        weights /= weights.sum(axis=1, keepdims=True)
        weights = _stretch(weights)
        new_place = _mean_over_seeds(
            new, new_draws, columns, weights, comparison.new.is_probe and len(members) < MIN_SEEDS, limits
        )
        old_place = _mean_over_seeds(old, old_draws, columns, weights, are_probes and len(members) < MIN_SEEDS)
        of_task = {
            measure.name: _mean_over_seeds(
                values, draws, columns, weights, measure.is_probe and len(members) < MIN_SEEDS
            )[0]
            for measure, (values, draws) in zip(tasks, per_task, strict=True)
        }
        points.append(Point(setting, new_place[0], old_place[0], new_place[1], old_place[1], of_task))
    base = None
    if first.base is not None:
        zeros = np.zeros(RESAMPLES)
        spread = (None, None, None) if comparison.new.is_probe else interval(new_draws[:, -1])
        base = Point(None, Estimate(float(new[-1]), *spread), Estimate(0.0), new_draws[:, -1], zeros)
    runs = [
        (position, float(new[column[number]]), float(old[column[number]]))
        for position, (_, members) in enumerate(kept)
        for number in members
    ]
    return TradeOff(points, base, runs, has_intervals, "seeds" if are_probes else "documents and seeds")


def _stretch(weights: Array) -> Array:
    """A bootstrap of the mean of k values has (k - 1) / k of its variance: moves the weights away from 1 / k by sqrt(k / (k - 1)).

    Args:
        weights: [draws, seeds], with the sum 1 in each draw.
    """
    k = weights.shape[1]
    return weights if k == 1 else 1 / k + math.sqrt(k / (k - 1)) * (weights - 1 / k)


def _share_limits(measure: Measure, values: Array) -> tuple[float, float]:
    """0 and 1 in the measure's unit and sign, where its scores are no losses and all between them."""
    if measure.unit != POINTS:
        return -math.inf, math.inf
    ends = sorted((0.0, measure.scale * (1 if measure.is_higher_better else -1)))
    is_share = bool(np.all((values >= ends[0]) & (values <= ends[1]) | np.isnan(values)))
    return (ends[0], ends[1]) if is_share else (-math.inf, math.inf)


def _mean_over_seeds(
    values: Array,
    draws: Array,
    columns: Sequence[int],
    weights: Array,
    is_fixed: bool,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Estimate, Array]:
    """A setting's mean and its draws.

    Args:
        values, draws: [runs] and [draws, runs].
        columns: the setting's runs.
        weights: of each of them in each draw, [draws, columns].
        is_fixed: there is too little to draw: few runs, measured by a probe.
        limits: of the mean.
    """
    drawn = (weights * draws[:, columns]).sum(axis=1).clip(*limits)
    return Estimate(float(values[list(columns)].mean()), *((None, None, None) if is_fixed else interval(drawn))), drawn


def interval(draws: Array) -> tuple[float, float, float]:
    """Standard deviation of the draws, and their 2.5% and 97.5% percentiles."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(draws.std(ddof=1)), float(low), float(high)


def _scores(measure: Measure, outcomes: Sequence[Outcome], names: Sequence[str]) -> tuple[Array, Array]:
    """The runs' scores and, last, the base's, and their draws; more is better. NaN: no base."""
    sign = measure.scale * (1 if measure.is_higher_better else -1)
    if measure.is_probe:
        base = outcomes[0].base
        values = np.array([*(one.score.value for one in outcomes), math.nan if base is None else base.value])
        return sign * values, np.tile(sign * values, (RESAMPLES, 1))
    every = [*(one.samples for one in outcomes), outcomes[0].base_samples or outcomes[0].samples]
    values, draws = _resample(measure, _table(measure, every, [*names, "the base"]))
    return sign * values, sign * draws


def _deltas(measure: Measure, outcomes: Sequence[Outcome], names: Sequence[str]) -> tuple[Array, Array]:
    """The runs' changes and their draws; more is better."""
    sign = measure.scale * (1 if measure.is_higher_better else -1)
    if measure.is_probe:
        values = np.array([one.delta.value if one.delta is not None else math.nan for one in outcomes])
        return sign * values, np.tile(sign * values, (RESAMPLES, 1))
    samples = [*(one.samples for one in outcomes), outcomes[0].base_samples]
    scores = _table(measure, samples, [*names, "the base"])
    values, draws = _resample(measure, {key: (cluster, row[:-1] - row[-1]) for key, (cluster, row) in scores.items()})
    return sign * values, sign * draws


_Documents = dict[tuple[Any, Any], tuple[Hashable, Array]]
"""Document to its cluster and its scores in all columns, NaN where it has none."""


def _table(measure: Measure, columns: Sequence[Sequence[Sample]], names: Sequence[str]) -> _Documents:
    scores = [{(sample["doc_id"], sample["doc_hash"]): sample for sample in samples} for samples in columns]
    for documents, name in zip(scores, names, strict=True):
        if documents.keys() != scores[0].keys():
            raise UserError(
                f"{measure.name}: {names[0]} and {name} were evaluated on different documents; evaluate both with the same data and --limit"
            )
    found: _Documents = {}
    for key, sample in sorted(scores[0].items()):
        values = [documents[key].get("score") for documents in scores]
        row = np.array([math.nan if value is None else value for value in values], dtype=float)
        cluster = sample.get("cluster")
        found[key] = (("document", key) if cluster is None else ("cluster", cluster), row)
    return found


def _resample(measure: Measure, documents: _Documents) -> tuple[Array, Array]:
    """Means over clusters, [columns], and of each draw of clusters, [draws, columns]."""
    groups: dict[Hashable, list[Array]] = {}
    for cluster, row in documents.values():
        groups.setdefault(cluster, []).append(row)
    table = np.array([_mean_of_known(np.array(rows)) for rows in groups.values()])
    is_known = ~np.isnan(table)
    table = np.where(is_known, table, 0.0)
    values = table.sum(axis=0) / is_known.sum(axis=0)
    rng = np.random.default_rng(zlib.crc32(measure.name.encode()))
    n, draws = len(table), []
    for _ in range(RESAMPLES // _CHUNK):
        chosen = rng.integers(n, size=(_CHUNK, n)) + n * np.arange(_CHUNK)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=_CHUNK * n).reshape(_CHUNK, n).astype(float)
        draws.append(counts @ table / np.maximum(counts @ is_known, 1))
    return values, np.concatenate(draws)


def _mean_of_known(rows: Array) -> Array:
    """[documents, columns] to [columns]; NaN where a column has no score in any of them."""
    is_known = ~np.isnan(rows)
    count = is_known.sum(axis=0)
    return np.where(count > 0, np.where(is_known, rows, 0.0).sum(axis=0) / np.maximum(count, 1), math.nan)
