"""The front at equal new-task score: what each method forgets where it has learned as much as the others.

A method's front is the set of its settings that none of its others beats on both axes, and the pretrained model: no training, no forgetting.
Between neighbours it is interpolated linearly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finch.report.measures import Estimate
from finch.report.settings import Point, TradeOff, interval

NUM_SCORES = 5
_ROUNDING = 1e-6  # a score of 40.0 is 400 steps of 0.1, not 401

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FrontValue:
    """A method's mean change of the old tasks at a new-task score.

    Attributes:
        change: None where the method does not reach the score.
        is_extrapolated: the score lies between the pretrained model and the method's mildest setting.
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
        reference: the method that differences are from.
    """

    scores: Sequence[float]
    methods: Mapping[str, Sequence[FrontValue]]
    highest: Mapping[str, float]
    reference: str | None


def non_dominated(new: Sequence[float], old: Sequence[float]) -> list[int]:
    """Positions of the points that no other one beats, by rising ``new``; more is better on both axes."""
    order = sorted(range(len(new)), key=lambda index: (-new[index], -old[index]))
    best, kept = -math.inf, []
    for index in order:
        if old[index] > best:
            best = old[index]
            kept.append(index)
    return kept[::-1]


def interpolate(new: Sequence[float], old: Sequence[float], score: float) -> float:
    """The change at ``score`` on the front through the points; below its first point and above its last one, theirs."""
    kept = non_dominated(new, old)
    return float(np.interp(score, [new[index] for index in kept], [old[index] for index in kept]))


def common_scores(points: Mapping[str, Sequence[Point]], resolution: float, base: Point | None = None) -> list[float]:
    """Up to ``NUM_SCORES`` scores, evenly spaced, that at least two methods reach; from where the fronts of two have settings on both sides,
    if they have.

    Args:
        points: by method.
        base: the pretrained model: settings that it beats are on no front.
        resolution: scores are rounded to it, downwards, so that the method whose setting is the first score or the last one reaches it.
    """
    if len(points) < 2:
        return []
    lowest = sorted(_mildest(group, base).new.value for group in points.values())
    highest = sorted((max(point.new.value for point in group) for group in points.values()), reverse=True)
    start = math.floor(lowest[1] / resolution + _ROUNDING)
    end = math.floor(highest[1] / resolution + _ROUNDING)
    steps = np.linspace(start, end, NUM_SCORES) if start < end else [end]
    return sorted({round(round(step) * resolution, 9) for step in steps})


def _mildest(points: Sequence[Point], base: Point | None) -> Point:
    """The first setting on the front; where the pretrained model beats them all, the one with the best score."""
    front = [one for one in _on_front([*points, *([base] if base is not None else [])]) if one.setting is not None]
    return front[0] if front else max(points, key=lambda one: one.new.value)


def points_by_method(trade_off: TradeOff) -> dict[str, list[Point]]:
    """Each method's settings, in the order of the trade-off."""
    groups: dict[str, list[Point]] = {}
    for point in trade_off.points:
        assert point.setting is not None
        groups.setdefault(point.setting.method, []).append(point)
    return groups


def compare_fronts(trade_off: TradeOff, *, resolution: float, order: Sequence[str]) -> Front:
    """
    Args:
        resolution: of the scores, 0.1 for percent.
        order: methods, the reference first.
    """
    groups = points_by_method(trade_off)
    groups = {method: groups[method] for method in order if method in groups}
    scores = common_scores(groups, resolution, trade_off.base)
    highest = {method: max(point.new.value for point in points) for method, points in groups.items()}
    draws = {method: front_draws(points, trade_off.base, scores) for method, points in groups.items()}
    reference = next(iter(groups), None)
    methods = {}
    for method, points in groups.items():
        every = [*points, trade_off.base] if trade_off.base is not None else points
        kept = _on_front(every)
        # Where the pretrained model itself is beaten, a score below the method's first setting is reached by that setting.
        mildest = kept[1].new.value if kept[0].setting is None and len(kept) > 1 else -math.inf
        values = []
        for number, score in enumerate(scores):
            if score > highest[method]:
                values.append(FrontValue(None))
                continue
            change = _value(every, score)
            difference = None
            if method != reference and score <= highest[str(reference)]:
                other = _value([*groups[str(reference)], *([trade_off.base] if trade_off.base else [])], score)
                spread = draws[method][:, number] - draws[str(reference)][:, number]
                difference = _estimate(change - other, spread, trade_off.has_intervals)
            values.append(
                FrontValue(
                    _estimate(change, draws[method][:, number], trade_off.has_intervals),
                    score < mildest - resolution,
                    difference,
                )
            )
        methods[method] = values
    return Front(scores, methods, highest, reference)


def _on_front(points: Sequence[Point]) -> list[Point]:
    return [
        points[index] for index in non_dominated([one.new.value for one in points], [one.old.value for one in points])
    ]


def _value(points: Sequence[Point], score: float) -> float:
    return interpolate([point.new.value for point in points], [point.old.value for point in points], score)


def front_draws(points: Sequence[Point], base: Point | None, scores: Sequence[float] | Array) -> Array:
    """[draws, scores]: the change at each score on the front of each draw of the bootstrap."""
    every = [*points, base] if base is not None else list(points)
    new = np.stack([point.new_draws for point in every], axis=1)
    old = np.stack([point.old_draws for point in every], axis=1)
    found = np.empty((len(new), len(scores)))
    for number, (one, other) in enumerate(zip(new.tolist(), old.tolist(), strict=True)):
        kept = non_dominated(one, other)
        found[number] = np.interp(scores, [one[index] for index in kept], [other[index] for index in kept])
    return found


def _estimate(value: float, draws: Array, has_intervals: bool) -> Estimate:
    return Estimate(value, *(interval(draws) if has_intervals and np.ptp(draws) > 0 else (None, None, None)))
