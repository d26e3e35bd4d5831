"""The report's figures: the trade-off, the fronts, reliability, and curves over steps; each a file, in one style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finch.evaluation.statistics import confidence_bins
from finch.report.front import Front, Point, TradeOff, on_front, points_by_method, with_base
from finch.report.measures import Estimate
from finch.style import (
    COLOURS,
    LESS_FORGOTTEN,
    MORE_LEARNED,
    PRETRAINED,
    Drawing,
    Name,
    Style,
    name_ends,
    name_places,
    new_figure,
    save,
)
from finch.sweep.grid import LR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_SETTINGS = 16
"""From this number of settings on, the bars of intervals are fainter."""
MANY_METHODS = 7
"""From this number of methods on, markers are smaller."""
SMALL_SHARE = 0.6
"""Of an axis, for settings that the pretrained model does not beat."""
MAX_POINTS = 300  # per curve
SMOOTHING_STEPS = 20
NUM_MARKERS = 8  # per curve
_EDGE = {"markeredgecolor": COLOURS["page"], "markeredgewidth": 0.5}  # keeps markers apart that lie on each other


def draw_trade_off(
    trade_off: TradeOff,
    styles: Mapping[str, Style],
    folder: Path,
    *,
    new_label: str,
    old_label: str,
    sign: tuple[int, int],
) -> Drawing:
    """
    Args:
        sign: of what is shown on each axis: -1 for a loss, whose axis is inverted, so that up and right are better on every figure.
    """
    figure, axes = new_figure(4.2, f"{new_label}\n{MORE_LEARNED}", f"{old_label}\n{LESS_FORGOTTEN}")
    points = list(trade_off.points)
    by_method = points_by_method(trade_off)
    names = []
    for point in points:
        for new, old in point.runs if len(point.setting.runs) > 1 else ():
            colour = styles[point.setting.method].hex
            axes.plot(sign[0] * new, sign[1] * old, ".", color=colour, markersize=2.5, alpha=0.55, zorder=2)
    for method in (one for one in styles if one in by_method):
        style, group = styles[method], by_method[method]
        for rates in _by_learning_rate(group):
            x, y = [sign[0] * one.new.value for one in rates], [sign[1] * one.old.value for one in rates]
            axes.plot(x, y, color=style.hex, linewidth=0.8, alpha=0.45, zorder=2)
        for point in group:
            _draw_point(axes, point, sign, style, alpha=0.7 if len(points) <= MANY_SETTINGS else 0.35)
        names.append(Name(style.label, style.hex, [_place(point, sign) for point in group]))
    front = on_front(with_base(points, trade_off.base))
    axes.step(
        [sign[0] * one.new.value for one in front],
        [sign[1] * one.old.value for one in front],
        where="pre",
        color=COLOURS["muted"],
        linewidth=1.0,
        linestyle=(0, (4, 2)),
        zorder=1,
    )
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7, zorder=1)
    if trade_off.base is not None:
        _draw_point(axes, trade_off.base, sign, PRETRAINED, size=10)
        names.append(Name(PRETRAINED.label, PRETRAINED.hex, [_place(trade_off.base, sign)]))
    outside = _leave_out(axes, trade_off, sign)
    for axis, invert in zip((axes.xaxis, axes.yaxis), sign, strict=True):
        axis.set_inverted(invert < 0)
    name_places(axes, reversed(names))
    outside_text = (
        f" Outside: {'a setting' if outside == 1 else f'{outside} settings'} that the pretrained model beats on the new task and on the old ones; "
        f"{'it is' if outside == 1 else 'they are'} in the table."
        if outside
        else ""
    )
    intervals = f"Bars are 95% intervals over {trade_off.drawn}. " if trade_off.has_intervals else ""
    caption = (
        f"A marker is the mean of a setting's seeds, small dots are single runs. {intervals}"
        "Thin lines join a method's settings by learning rate. The dashed steps join the best settings: no other one learns more and forgets less."
        + outside_text
    )
    return save(figure, folder, "trade_off", "Learned against forgotten", caption)


def _draw_marker(axes: Axes, x: float, y: float, style: Style, **options: Any) -> None:
    axes.plot(x, y, marker=style.marker, linestyle="none", color=style.hex, **options)


def _place(point: Point, sign: tuple[int, int]) -> tuple[float, float]:
    return sign[0] * point.new.value, sign[1] * point.old.value


def _leave_out(axes: Axes, trade_off: TradeOff, sign: tuple[int, int]) -> int:
    """Ends the axes at the settings that the pretrained model does not beat, where the others would take much of them.

    Returns:
        How many settings are outside.
    """
    base = trade_off.base
    if base is None:
        return 0
    points = [*trade_off.points, base]
    kept = [one for one in points if one.new.value >= base.new.value or one.old.value >= base.old.value]
    old = [_extent([one.old for one in those], sign[1]) for those in (kept, points)]
    new = [_extent([one.new for one in those], sign[0]) for those in (kept, points)]
    if len(kept) == 1 or all(few[1] - few[0] > SMALL_SHARE * (all_[1] - all_[0]) for few, all_ in (new, old)):
        return 0
    limits = [(low - 0.05 * (high - low), high + 0.05 * (high - low)) for low, high in (new[0], old[0])]
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    return sum(
        any(not low <= at <= high for at, (low, high) in zip(_place(one, sign), limits, strict=True)) for one in points
    )


def _extent(estimates: Sequence[Estimate], sign: int) -> tuple[float, float]:
    """Of the values and their intervals, as shown."""
    ends = [sign * one for each in estimates for one in (each.value, each.low, each.high) if one is not None]
    return min(ends), max(ends)


def _draw_point(
    axes: Axes, point: Point, sign: tuple[int, int], style: Style, size: float = 6, alpha: float = 0.7
) -> None:
    x, y = _place(point, sign)
    for one, other, is_vertical in ((point.new, y, False), (point.old, x, True)):
        if one.low is None or one.high is None:
            continue
        ends = [sign[is_vertical] * one.low, sign[is_vertical] * one.high]
        line = ([other, other], ends) if is_vertical else (ends, [other, other])
        axes.plot(*line, color=style.hex, linewidth=1.0, alpha=alpha, zorder=3)
    _draw_marker(axes, x, y, style, markersize=size, **_EDGE, zorder=4)


def _by_learning_rate(points: list[Point]) -> list[list[Point]]:
    """Settings that differ only in their learning rate, by it."""

    def others(point: Point) -> str:
        return str(sorted((key, str(value)) for key, value in point.setting.values.items() if key != LR))

    def learning_rate(point: Point) -> float:
        return float(point.setting.values.get(LR) or 0)

    ordered = sorted(points, key=lambda point: (others(point), learning_rate(point)))
    return [list(group) for _, group in groupby(ordered, key=others)]


def draw_front(
    front: Front,
    styles: Mapping[str, Style],
    folder: Path,
    *,
    new_label: str,
    old_label: str,
    sign: tuple[int, int],
    places: int,
) -> Drawing:
    figure, axes = new_figure(3.9, f"at equal {new_label}\n{MORE_LEARNED}", f"{old_label}\n{LESS_FORGOTTEN}")
    methods = [method for method in styles if method in front.methods]
    width = 0.7 / max(1, len(methods))
    size = 5.5 if len(methods) <= MANY_METHODS else 4.5
    names = []
    for order, method in enumerate(methods):
        style = styles[method]
        shift = (order - (len(methods) - 1) / 2) * width
        marks = []
        for number, value in enumerate(front.methods[method]):
            if value.change is None:
                continue
            x, y = number + shift, sign[1] * value.change.value
            if value.change.low is not None and value.change.high is not None:
                ends = [sign[1] * value.change.low, sign[1] * value.change.high]
                axes.plot([x, x], ends, color=style.hex, linewidth=1.2, alpha=0.8)
            face = COLOURS["page"] if value.is_extrapolated else style.hex
            _draw_marker(axes, x, y, style, markerfacecolor=face, markersize=size, markeredgewidth=1.1)
            marks.append((x, y))
        axes.plot(*zip(*marks, strict=True), color=style.hex, linewidth=0.8, alpha=0.35, zorder=1)
        names.append(Name(style.label, style.hex, marks))
    for number in range(1, len(front.scores)):
        axes.axvline(number - 0.5, color=COLOURS["grid"], linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7)
    axes.set_xticks(range(len(front.scores)), [f"{sign[0] * score:.{places}f}" for score in front.scores])
    axes.set_xlim(-0.5, len(front.scores) - 0.5)
    axes.yaxis.set_inverted(sign[1] < 0)
    name_places(axes, names)
    caption = (
        "Each group compares methods where they have learned equally much. A method that does not reach a score is absent there. "
        "Hollow markers are guesses, on a straight line from the pretrained model: the method has no setting that learned so little."
    )
    return save(figure, folder, "front", "Forgetting at equal new-task score", caption)


@dataclass(frozen=True)
class Answers:
    """Stated confidences in [0, 1], and whether the answers were right."""

    method: str | None
    confidences: Sequence[float]
    correct: Sequence[float]


def draw_scores(
    marks: Sequence[tuple[str, float, Estimate]],
    base: Estimate | None,
    levels: Mapping[str, float],
    styles: Mapping[str, Style],
    folder: Path,
    *,
    name: str,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    scale: float,
    is_log: bool,
) -> Drawing:
    """
    Args:
        marks: (method, x, score) of each run.
        levels: horizontal lines by their labels, such as chance, in the scores' unit.
    """
    figure, axes = new_figure(3.6, x_label, y_label)
    places: dict[str, list[tuple[float, float]]] = {}
    for method, x, score in marks:
        style = styles[method]
        if score.low is not None and score.high is not None:
            axes.plot([x, x], [scale * score.low, scale * score.high], color=style.hex, linewidth=1.0, alpha=0.6)
        _draw_marker(axes, x, scale * score.value, style, markersize=5.5, **_EDGE)
        places.setdefault(method, []).append((x, scale * score.value))
    names = [Name(styles[method].label, styles[method].hex, those) for method, those in places.items()]
    lines = {text: ("muted", value) for text, value in levels.items()}
    if base is not None:
        if base.low is not None and base.high is not None:
            axes.axhspan(scale * base.low, scale * base.high, color=COLOURS["muted"], alpha=0.15, linewidth=0)
        axes.axhline(scale * base.value, color=COLOURS["ink"], linewidth=1.2)
        lines["pretrained, 95%"] = "ink", base.value
    for value, pattern in zip(levels.values(), (":", "--"), strict=False):
        axes.axhline(scale * value, color=COLOURS["muted"], linewidth=1.0, linestyle=pattern)
    if is_log:
        axes.set_xscale("log")
    ends = axes.get_xlim()
    axes.set_xlim(ends)
    names += [Name(text, COLOURS[ink], [(x, scale * value) for x in ends]) for text, (ink, value) in lines.items()]
    name_places(axes, names)
    return save(figure, folder, name, title, caption)


def bin_answers(answers: Answers) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, answers) of each bin that has any."""
    confidences, correct = np.asarray(answers.confidences, dtype=float), np.asarray(answers.correct, dtype=float)
    bins = confidence_bins(answers.confidences)
    return [
        (float(confidences[bins == one].mean()), float(correct[bins == one].mean()), int((bins == one).sum()))
        for one in np.unique(bins)
    ]


def draw_calibration(answers: Sequence[Answers], styles: Mapping[str, Style], folder: Path, *, chosen: str) -> Drawing:
    """
    Args:
        chosen: which runs are shown, for the caption.
    """
    figure, axes = new_figure(4.2, "stated confidence, %", "right answers, %")
    axes.plot([0, 100], [0, 100], color=COLOURS["muted"], linewidth=1.0, linestyle=":")
    names = [Name("calibrated", COLOURS["muted"], [(at, at) for at in range(10, 100, 10)])]
    for one in answers:
        style = styles[one.method] if one.method is not None else PRETRAINED
        bins = bin_answers(one)
        most = max(count for _, _, count in bins)
        axes.plot(
            [100 * confidence for confidence, _, _ in bins],
            [100 * accuracy for _, accuracy, _ in bins],
            color=style.hex,
            linewidth=1.1,
            alpha=0.7,
        )
        for confidence, accuracy, count in bins:
            size = 3 + 5 * (count / most) ** 0.5
            axes.plot(100 * confidence, 100 * accuracy, marker=style.marker, color=style.hex, markersize=size)
        names.append(
            Name(style.label, style.hex, [(100 * confidence, 100 * accuracy) for confidence, accuracy, _ in bins])
        )
    axes.set(xlim=(-3, 103), ylim=(-3, 103))
    name_places(axes, names)
    caption = f"Answers in ten bins by their stated confidence; below the dotted line, a model is overconfident. Larger markers have more answers. {chosen}"
    return save(figure, folder, "calibration", "Stated confidence against accuracy", caption)


@dataclass(frozen=True)
class Curve:
    """A run's, or the paper's: values over steps."""

    method: str
    steps: Sequence[int]
    values: Sequence[float]
    is_paper: bool = False


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most ``MAX_POINTS`` of the points, evenly spaced, the last one included: a page holds many curves."""
    stride = math.ceil(len(steps) / MAX_POINTS) or 1
    chosen = sorted({*range(0, len(steps), stride), *([len(steps) - 1] if steps else [])})
    return [steps[index] for index in chosen], [values[index] for index in chosen]


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with those before it: a twentieth of the values, at most ``SMOOTHING_STEPS``."""
    width = max(1, min(SMOOTHING_STEPS, len(values) // 20))
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        means.append(total / min(index + 1, width))
    return means


def draw_curves(
    curves: Sequence[Curve],
    styles: Mapping[str, Style],
    folder: Path,
    *,
    name: str,
    title: str,
    caption: str,
    label: str,
    from_zero: bool = False,
    is_scientific: bool = False,
    is_inverted: bool = False,
) -> Drawing:
    """
    Args:
        curves: with a few markers each; their names stand where they end.
        is_inverted: less is better, so that less is up.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(3.0, "step", label)
    for curve in sorted(curves, key=lambda one: one.is_paper):
        style = styles[curve.method]
        steps, values = thin(curve.steps, curve.values)
        every = max(1, len(steps) // NUM_MARKERS)
        # Side by side where curves meet.
        first = list(styles).index(curve.method) * every // len(styles) if every > 1 else 0
        marks = {} if curve.is_paper else {"marker": style.marker, "markersize": 4, "markevery": (first, every)}
        axes.plot(
            steps,
            values,
            color=style.hex,
            linewidth=0.9 if curve.is_paper else 1.5,
            linestyle=":" if curve.is_paper else "-",
            alpha=0.8,
            label=f"{style.label}, paper" if curve.is_paper else style.label,
            **marks,  # type: ignore[arg-type]
        )
    if from_zero:
        axes.set_ylim(bottom=0)
    if is_scientific:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.yaxis.get_offset_text().set(color=COLOURS["ink"], fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, max((curve.steps[-1] for curve in curves), default=0) or 1)
    axes.yaxis.set_inverted(is_inverted)
    name_ends(axes)
    return save(figure, folder, name, title, caption)
