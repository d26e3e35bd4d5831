"""Settings, their trade-off between the new task and the old ones, and the methods' fronts at equal new-task score.

A setting is all runs that differ only in their seed. A method's front is the set of its settings that none of its others beats on both axes,
and the pretrained model: no training, no forgetting. Between neighbours it is interpolated linearly.

Intervals come from one bootstrap of everything at once. A draw takes documents of each task, and seeds, with replacement, the same ones for
all runs and the pretrained model: differences between runs are paired.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from finch.base.errors import UserError
from finch.evaluation.results import POINTS
from finch.evaluation.statistics import Array, mean_of_known, resample, score_table
from finch.evaluation.tasks.registry import VALIDATION
from finch.study.report.measures import Comparison, Estimate
from finch.study.report.runs import Run
from finch.study.report.selection import Measure
from finch.study.sweep.grid import LABEL, METHOD, SEED

RESAMPLES = 2_000
FOLDER = "folder"
"""Key of the value that is added to settings which are otherwise equal: the name of the run's folder."""
MIN_SEEDS = 5
"""For an interval over seeds only: of two or three, the bootstrap's interval is their range."""
NUM_SCORES = 5
NUM_READINGS = 101
"""Scores at which two methods' fronts are read for their mean ratio."""
_MAX_WITHOUT_RATIO = 0.01
"""Share of the draws that may have no quotient: where a method has forgotten nothing there is none."""
Limits = tuple[float, float]
_NO_LIMITS: Limits = (-math.inf, math.inf)
_TIE = 9  # decimals: accuracies are often equal, and means of equal ones differ in their last bits


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ only in their seed.

    Attributes:
        method: of all of them.
        values: what they share, such as optimizer.lr.
        runs: their positions in the comparison.
    """

    method: str
    values: Mapping[str, Any]
    runs: Sequence[int]


@dataclass(frozen=True, eq=False)
class Point:
    """A setting in the trade-off, mean over its seeds, in units where more is better: percent and points, or minus nats per token.

    Attributes:
        new: score on the new task.
        old: mean change of the old tasks.
        new_draws, old_draws: the same of each draw of the bootstrap, [draws].
        runs: (new, old) of each run.
        tasks: the change of each old task, by name; of those that are not the trade-off's where all its runs have one.
    """

    setting: Setting
    new: Estimate
    old: Estimate
    new_draws: Array
    old_draws: Array
    runs: Sequence[tuple[float, float]] = ()
    tasks: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class TradeOff:
    """All settings that have the new task and the old ones.

    Attributes:
        points: one per setting.
        base: the pretrained model; None where its score on the new task was not measured.
        has_intervals: False where there are neither documents to draw nor ``MIN_SEEDS`` seeds.
        drawn: what intervals are over.
    """

    points: Sequence[Point]
    base: Point | None
    has_intervals: bool
    drawn: str = "documents and seeds"


def group_settings(comparison: Comparison) -> list[Setting]:
    """In the order of the runs. Runs with the same values and the same seed differ in something else: each is a separate setting. So are those whose
    configs train otherwise, which their values then say."""
    groups: dict[tuple[tuple[tuple[str, str], ...], int], list[int]] = {}
    others: dict[Hashable, list[dict[str, Any]]] = {}
    of_method: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(comparison.runs):
        same = tuple(sorted((key, str(value)) for key, value in _without_seed(run.values).items()))
        trained_by = others.setdefault(same, [])
        if run.trained_by not in trained_by:
            trained_by.append(run.trained_by)
        groups.setdefault((same, trained_by.index(run.trained_by)), []).append(number)
        if run.config:
            of_method.setdefault(run.method, []).append(_unnamed(run))
    settings = []
    for numbers in groups.values():
        runs = [comparison.runs[number] for number in numbers]
        values = {key: value for key, value in _without_seed(runs[0].values).items() if key not in (METHOD, LABEL)}
        differing = _differing(_unnamed(runs[0]), of_method.get(runs[0].method, []))
        values |= {key: value for key, value in differing.items() if key not in values}
        if len({run.seed for run in runs}) == len(runs):
            settings.append(Setting(runs[0].method, values, numbers))
        else:
            for number, run in zip(numbers, runs, strict=True):
                settings.append(Setting(run.method, {**values, FOLDER: run.folder.name}, [number]))
    return settings


def _unnamed(run: Run) -> dict[str, Any]:
    """What a run's config trains by that its values do not name."""
    names = {key.removesuffix("._component_") for key in run.values}
    return {key: value for key, value in run.trained_by.items() if key not in names}


def _differing(trained_by: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of a config in which some differ."""
    keys = sorted({key for each in others for key in each})
    return {key: trained_by.get(key) for key in keys if any(each.get(key) != others[0].get(key) for each in others)}


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Also without the seed of the run that a cell of a sweep replays."""
    kept = {key: value for key, value in values.items() if key != SEED}
    return {key: _without_seed(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def trade_off(comparison: Comparison, settings: Sequence[Setting]) -> TradeOff:
    """
    Raises:
        UserError: two runs were evaluated on different documents of a task.
    """
    complete = {setting: [one for one in setting.runs if comparison.is_complete(one)] for setting in settings}
    kept = {setting: members for setting, members in complete.items() if members}
    if comparison.new is None or not kept:
        return TradeOff([], None, False)
    numbers = [number for members in kept.values() for number in members]
    column = {number: index for index, number in enumerate(numbers)}
    new, new_draws = _values_and_draws(comparison, numbers, comparison.new, is_change=False)
    # A share, as accuracies are, stays one when the weights of the seeds are corrected.
    limits = _share_limits(comparison.new, new)
    others = [one for one in comparison.other_old if all(comparison.has_change(number, one) for number in numbers)]
    tasks = [*comparison.old, *others]
    per_task = [_values_and_draws(comparison, numbers, measure, is_change=True) for measure in tasks]
    old, old_draws = (np.mean(those, axis=0) for those in zip(*per_task[: len(comparison.old)], strict=True))
    seeds, seed_of = np.unique([str(comparison.runs[number].seed) for number in numbers], return_inverse=True)
    counts = np.random.default_rng(0).multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=RESAMPLES)
    are_probes = all(measure.is_probe for measure in comparison.old)
    has_intervals = not are_probes or min(map(len, kept.values())) >= MIN_SEEDS
    points = []
    for setting, members in kept.items():
        columns = [column[number] for number in members]
        weights = counts[:, seed_of[columns]].astype(float)
        weights[weights.sum(axis=1) == 0] = 1  # a draw without any of this setting's seeds
        weights /= weights.sum(axis=1, keepdims=True)
        weights = _correct_bootstrap_variance(weights)
        new_mean, new_means = _mean_over_seeds(new, new_draws, columns, weights, comparison.new.is_probe, limits)
        old_mean, old_means = _mean_over_seeds(old, old_draws, columns, weights, are_probes)
        of_task = {
            measure.name: _mean_over_seeds(values, draws, columns, weights, measure.is_probe)[0]
            for measure, (values, draws) in zip(tasks, per_task, strict=True)
        }
        runs = [(float(new[index]), float(old[index])) for index in columns]
        points.append(Point(setting, new_mean, old_mean, new_means, old_means, runs, of_task))
    base = None
    if comparison.outcomes[numbers[0]][comparison.new.name].base is not None:
        score = _estimate(float(new[-1]), new_draws[:, -1], not comparison.new.is_probe)
        base = Point(Setting("pretrained", {}, []), score, Estimate(0.0), new_draws[:, -1], np.zeros(RESAMPLES))
    return TradeOff(points, base, has_intervals, "seeds" if are_probes else "documents and seeds")


def _correct_bootstrap_variance(weights: Array) -> Array:
    """A bootstrap of the mean of k values has (k - 1) / k of its variance: moves the weights, [draws, k], away from 1 / k by sqrt(k / (k - 1))."""
    k = weights.shape[1]
    return weights if k == 1 else 1 / k + math.sqrt(k / (k - 1)) * (weights - 1 / k)


def _share_limits(measure: Measure, values: Array) -> Limits:
    """0 and 1 in the measure's unit and sign, where its scores are no losses and all between them."""
    low, high = sorted((0.0, measure.scale * measure.sign))
    is_share = measure.unit == POINTS and low <= np.nanmin(values) and np.nanmax(values) <= high
    return (low, high) if is_share else _NO_LIMITS


def _mean_over_seeds(
    values: Array, draws: Array, columns: list[int], weights: Array, is_probe: bool, limits: Limits = _NO_LIMITS
) -> tuple[Estimate, Array]:
    """A setting's mean and its draws: values [runs], draws [draws, runs], weights [draws, columns] of the setting's runs."""
    drawn = (weights * draws[:, columns]).sum(axis=1).clip(*limits)
    has_enough = not is_probe or len(columns) >= MIN_SEEDS
    return _estimate(float(values[columns].mean()), drawn, has_enough), drawn


def interval(draws: Array) -> tuple[float, float, float]:
    """Standard deviation of the draws, and their 2.5% and 97.5% percentiles."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(draws.std(ddof=1)), float(low), float(high)


def _values_and_draws(
    comparison: Comparison, numbers: Sequence[int], measure: Measure, *, is_change: bool
) -> tuple[Array, Array]:
    """The runs' changes, or their scores and, last, the pretrained model's (NaN: not measured); and their draws. More is better."""
    outcomes = [comparison.outcomes[number][measure.name] for number in numbers]
    factor = measure.scale * measure.sign
    if measure.is_probe:
        found = [one.delta for one in outcomes] if is_change else [*(one.score for one in outcomes), outcomes[0].base]
        values = factor * np.array([math.nan if one is None else one.value for one in found])
        return values, np.tile(values, (RESAMPLES, 1))
    samples = [*(one.samples for one in outcomes), outcomes[0].base_samples or outcomes[0].samples]
    names = [*(str(comparison.runs[number].folder) for number in numbers), "the base"]
    try:
        scores, clusters = score_table(samples, names)
    except UserError as error:
        raise UserError(f"{measure.name}: {error}") from error
    table = scores[:, :-1] - scores[:, -1:] if is_change else scores
    values, draws = resample(table, clusters, RESAMPLES, seed=zlib.crc32(measure.name.encode()))
    return factor * values, factor * draws


def choose_by(comparison: Comparison, trade_off: TradeOff) -> tuple[dict[Setting, float], str]:
    """The scores by which a method's best setting is chosen, more is better, and what they are, in words.

    As in the paper they are those on the new task's validation rows, mean over the seeds that have them; where a setting has none, the
    reported ones.
    """
    new = comparison.new
    if new is None or not trade_off.points:
        return {}, "new-task score"
    chosen = {}
    for setting in (point.setting for point in trade_off.points):
        results = [comparison.runs[number].results.get(f"{new.source}{VALIDATION}") for number in setting.runs]
        scores = [task.score for one in results if one for task in one.tasks.values() if task.score is not None]
        if not scores:
            return {point.setting: point.new.value for point in trade_off.points}, f"reported score on {new.name}"
        chosen[setting] = new.sign * fmean(scores)
    return chosen, f"score on the validation rows of {new.name}"


@dataclass(frozen=True)
class FrontValue:
    """A method's mean change of the old tasks at a new-task score.

    Attributes:
        change: None where the method does not reach the score.
        is_extrapolated: the score lies between the pretrained model and the method's first setting on its front.
        difference: from the reference method at the same score; None for that method itself, and where one of both does not reach the score.
    """

    change: Estimate | None
    is_extrapolated: bool = False
    difference: Estimate | None = None


@dataclass(frozen=True)
class Front:
    """The methods compared at equal scores.

    Attributes:
        scores: on the new task, rising.
        methods: values at each score, by method.
        highest: each method's highest score.
        pairs: each other method against the reference; without those that share no score with it.
    """

    scores: Sequence[float]
    methods: Mapping[str, Sequence[FrontValue]]
    highest: Mapping[str, float]
    pairs: Mapping[str, Pair] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The method that differences are from: the first one."""
        return next(iter(self.methods))


@dataclass(frozen=True)
class Reading:
    """What two methods have forgotten at an equal new-task score, or on average over several.

    Attributes:
        difference: the one's forgetting minus the other's, in the unit of the old tasks.
        ratio: the one's forgetting divided by the other's, below 1 where the one forgets less, a geometric mean over scores; None where one of them
            forgets nothing at one of the scores, or only one of them does so in more than 1% of the draws.
        share: of the draws that reach one of the scores; the intervals are over these.
    """

    difference: Estimate
    ratio: Estimate | None
    share: float


@dataclass(frozen=True, eq=False)
class Pair:
    """Two methods where they have learned equally much.

    Attributes:
        scores: on the new task, rising, evenly spaced; from where the measured parts of both fronts have begun to the highest that both reach.
        is_guess: these parts do not overlap: the only score is the highest one, where a line from the pretrained model is read.
        mean: over the scores.
        lowest, highest: at the first score and at the last one.
        without_one: the means with one setting of either method left out, and the common range found again, without intervals: what straight lines
            between rates are worth. Without those that leave no common range.
        draws: [draws] the mean log of the ratio in each draw, NaN where it has none.
    """

    scores: Array
    is_guess: bool
    mean: Reading
    lowest: Reading
    highest: Reading
    without_one: Sequence[Reading]
    draws: Array

    @property
    def ratios_without_one(self) -> tuple[float, float] | None:
        """The smallest and the largest of ``without_one``."""
        found = [one.ratio.value for one in self.without_one if one.ratio is not None]
        return (min(found), max(found)) if found else None

    @property
    def verdict(self) -> int | None:
        """-1: the one forgets less, 1: more, by the mean's interval and with any one setting left out; 0: neither can be shown; None: no interval, or
        a guess."""
        has_ratio = self.mean.ratio is not None
        mean, *readings = [one.ratio if has_ratio else one.difference for one in (self.mean, *self.without_one)]
        if self.is_guess or mean is None or mean.ends is None:
            return None
        values = [*mean.ends, *(one.value for one in readings if one is not None)]
        neutral = 1.0 if has_ratio else 0.0
        return -1 if max(values) < neutral else 1 if min(values) > neutral else 0


def non_dominated(new: Sequence[float], old: Sequence[float]) -> list[int]:
    """Positions of the points that no other one beats, by rising ``new``; more is better on both axes."""
    order = sorted(range(len(new)), key=lambda index: (-round(new[index], _TIE), -old[index]))
    best, kept = -math.inf, []
    for index in order:
        if old[index] > best:
            best = old[index]
            kept.append(index)
    return kept[::-1]


def interpolate(new: Sequence[float], old: Sequence[float], scores: Sequence[float] | Array) -> Array:
    """[scores] the changes at ``scores`` on the front through the points; below its first point, that one's; above its last one NaN."""
    kept = non_dominated(new, old)
    found = np.interp(scores, [new[index] for index in kept], [old[index] for index in kept])
    found[np.asarray(scores) > new[kept[-1]] + 10.0**-_TIE] = math.nan
    return found


def common_scores(points: Mapping[str, Sequence[Point]], resolution: float, base: Point | None = None) -> list[float]:
    """Up to ``NUM_SCORES`` scores, evenly spaced, that at least two methods reach; from where the fronts of two have settings on both sides,
    if they have.

    Args:
        points: by method.
        base: the pretrained model: settings that it beats are on no front.
        resolution: of the scores between the first and the last one, which are those of settings, so that these reach them.
    """
    if len(points) < 2:
        return []
    low = sorted(_first_on_front(group, base).new.value for group in points.values())[1]
    high = sorted(map(_highest, points.values()), reverse=True)[1]
    start, end = round(low / resolution), round(high / resolution)
    if start >= end:
        return [high]
    steps = {round(step) for step in np.linspace(start, end, NUM_SCORES)} - {start, end}
    return [low, *sorted(round(step * resolution, 9) for step in steps), high]


def _first_on_front(points: Sequence[Point], base: Point | None) -> Point:
    """The first setting on the front; where the pretrained model beats them all, the one with the best score."""
    front = [one for one in on_front(with_base(points, base)) if one is not base]
    return front[0] if front else max(points, key=lambda one: one.new.value)


def _highest(points: Sequence[Point]) -> float:
    return max(point.new.value for point in points)


def points_by_method(trade_off: TradeOff) -> dict[str, list[Point]]:
    """Each method's settings, in the order of the trade-off."""
    groups: dict[str, list[Point]] = {}
    for point in trade_off.points:
        groups.setdefault(point.setting.method, []).append(point)
    return groups


def compare_fronts(trade_off: TradeOff, *, resolution: float, order: Sequence[str]) -> Front:
    """
    Args:
        resolution: of the scores, 0.1 for percent.
        order: methods, the reference first.
    """
    found, base, has_intervals = points_by_method(trade_off), trade_off.base, trade_off.has_intervals
    groups = {method: found[method] for method in order if method in found}
    scores = common_scores(groups, resolution, base)
    highest = {method: _highest(points) for method, points in groups.items()}
    lines = {method: _read(with_base(points, base), scores) for method, points in groups.items()}
    reference = next(iter(groups), "")
    methods: dict[str, list[FrontValue]] = {}
    for method, points in groups.items():
        start = _measured_from(points, base)
        methods[method] = []
        for number, score in enumerate(scores):
            change = difference = None
            (value, draws), (other, other_draws) = (
                (float(values[number]), drawn[:, number]) for values, drawn in (lines[method], lines[reference])
            )
            if score <= highest[method]:
                change = _estimate(value, draws, has_intervals)
                if method != reference and score <= highest[reference]:
                    difference = _estimate(value - other, draws - other_draws, has_intervals)
            is_extrapolated = start is not None and score < start
            methods[method].append(FrontValue(change, is_extrapolated, difference))
    pairs = {
        method: compare_pair(points, groups[reference], base, has_intervals=has_intervals)
        for method, points in groups.items()
        if method != reference
    }
    return Front(scores, methods, highest, pairs)


def compare_pair(
    one: Sequence[Point],
    other: Sequence[Point],
    base: Point | None,
    *,
    num_scores: int = NUM_READINGS,
    has_intervals: bool = True,
) -> Pair:
    """Two methods' forgetting at equal new-task scores over the range that both have measured.

    In a draw of the bootstrap a score beyond one of that draw's fronts is left out.

    Args:
        one, other: the settings of each.
        base: the pretrained model, a point of both fronts.
        num_scores: that are read.
        has_intervals: whether the draws are of enough to have any.
    """
    found = _common_range(one, other, base)
    low, high = found or (math.inf, min(_highest(one), _highest(other)))
    scores = np.linspace(low, high, num_scores) if low < high else np.array([high])
    lines = [_read(with_base(group, base), scores) for group in (one, other)]
    mean, draws = _reading(lines, slice(None), has_intervals)
    lowest, highest = (_reading(lines, [at], has_intervals)[0] for at in (0, -1))
    without = []
    for left_out in (*one, *other) if found is not None else ():
        fewer, others = ([point for point in group if point is not left_out] for group in (one, other))
        ends = _common_range(fewer, others, base) if fewer and others else None
        if ends is not None:
            values = [_values(with_base(group, base), np.linspace(*ends, num_scores)) for group in (fewer, others)]
            without.append(_reading([(each, each[None]) for each in values], slice(None), False)[0])
    return Pair(scores, found is None, mean, lowest, highest, without, draws)


def seed_points(method: str, runs: Sequence[Sequence[tuple[float, float]]] | Array) -> list[Point]:
    """Settings from numbers alone, for ``compare_pair``: means over seeds; the draws are the seeds, each by itself.

    Args:
        runs: [rates, seeds, 2] the score on the new task and the change of the old ones, in units where more is better: minus a loss.
    """
    points = []
    for seeds in np.asarray(runs, dtype=float):
        new, old = (Estimate(float(value)) for value in seeds.mean(axis=0))
        points.append(Point(Setting(method, {}, []), new, old, seeds[:, 0], seeds[:, 1]))
    return points


def _common_range(one: Sequence[Point], other: Sequence[Point], base: Point | None) -> tuple[float, float] | None:
    """From where the measured parts of both fronts have begun to the highest score that both reach; None: there is none."""
    starts = [_measured_from(group, base) for group in (one, other)]
    high = min(_highest(one), _highest(other))
    lowest = [min(point.new.value for point in group) for group in (one, other)]
    low = max(math.inf if start is None else start for start in (*starts, *lowest))
    return (low, high) if low <= high else None


def _measured_from(points: Sequence[Point], base: Point | None) -> float | None:
    """The score of the first setting on the front; None: the pretrained model beats them all. Where it is beaten itself, a score below that
    setting's is reached by the setting: minus infinity."""
    front = on_front(with_base(points, base))
    if front[0] is not base:
        return -math.inf
    return front[1].new.value if len(front) > 1 else None


def _reading(lines: Sequence[tuple[Array, Array]], at: slice | list[int], has_intervals: bool) -> tuple[Reading, Array]:
    """Means over the scores ``at`` these positions, and the mean log of the ratio in each draw; of both methods' changes, see ``_read``."""
    forgotten, drawn = [-values[at] for values, _ in lines], [-draws[:, at] for _, draws in lines]
    differences = mean_of_known(drawn[0] - drawn[1], axis=1)
    difference = _estimate(float((forgotten[0] - forgotten[1]).mean()), differences, has_intervals)
    share = 1.0 - float(np.isnan(differences).mean())
    # A score that neither pays for says nothing and is left out: NaN.
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = mean_of_known(np.log(drawn[0].clip(0)) - np.log(drawn[1].clip(0)), axis=1)
    is_infinite = np.isinf(draws)
    draws[is_infinite] = math.nan
    if min(forgotten[0].min(), forgotten[1].min()) <= 0 or is_infinite.mean() > _MAX_WITHOUT_RATIO:
        return Reading(difference, None, share), draws
    ratio = math.exp(float(np.log(forgotten[0] / forgotten[1]).mean()))
    return Reading(difference, _estimate(ratio, np.exp(draws), has_intervals), share), draws


def with_base(points: Sequence[Point], base: Point | None) -> list[Point]:
    return [*points, base] if base is not None else list(points)


def on_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats, by rising score."""
    kept = non_dominated([one.new.value for one in points], [one.old.value for one in points])
    return [points[index] for index in kept]


def _values(points: Sequence[Point], scores: Sequence[float] | Array) -> Array:
    return interpolate([one.new.value for one in points], [one.old.value for one in points], scores)


def _read(points: Sequence[Point], scores: Sequence[float] | Array) -> tuple[Array, Array]:
    """[scores] and [draws, scores]: the change at each score on the front, and on that of each draw of the bootstrap; NaN beyond it."""
    new, old = (
        np.stack(draws, axis=1).tolist()
        for draws in zip(*((one.new_draws, one.old_draws) for one in points), strict=True)
    )
    draws = np.array([interpolate(one, other, scores) for one, other in zip(new, old, strict=True)])
    return _values(points, scores), draws


def _estimate(value: float, draws: Array, has_intervals: bool) -> Estimate:
    known = draws[~np.isnan(draws)]
    return Estimate(value, *(interval(known) if has_intervals and len(known) and np.ptp(known) > 0 else (None,) * 3))
