"""The report's figures: the trade-off, the fronts, reliability, and curves over steps; each a file, in one style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finch.evaluation.results import POINTS
from finch.evaluation.statistics import confidence_bins
from finch.study.report.content import Report
from finch.study.report.front import Point, TradeOff, on_front, points_by_method, with_base
from finch.study.report.measures import Estimate
from finch.study.report.paper import Curve
from finch.study.report.selection import Measure
from finch.study.report.style import PRETRAINED, Drawing, Name, Style, name_places, new_figure, save
from finch.study.sweep.grid import LR
from finch.training.style import COLOURS, LESS_FORGOTTEN, MORE_LEARNED, name_ends

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
Answers = tuple[Sequence[float], Sequence[float]]
"""Stated confidences in [0, 1], and 1 where the answer was right, else 0."""
_EDGE = {"markeredgecolor": COLOURS["page"], "markeredgewidth": 0.5}  # keeps markers apart that lie on each other


def _old_label(report: Report) -> str:
    """Of the axis with the old tasks' change."""
    old = report.comparison.old
    kind = f"change of {old[0].name}"
    if len(old) > 1:
        are_losses = all(measure.is_probe and measure.metric == "loss" for measure in old)
        kind = "mean change of the probes' losses" if are_losses else "mean change of old tasks"
    return f"{kind}, {old[0].change_unit}\n{LESS_FORGOTTEN}"


def draw_trade_off(report: Report) -> Drawing:
    """The axis of a loss is inverted, so that up and right are better on every figure."""
    trade_off, styles, new, old = report.trade_off, report.names.styles, report.new, report.old
    figure, axes = new_figure(4.2, f"{new.label}\n{MORE_LEARNED}", _old_label(report))
    sign = new.sign, old.sign
    points = trade_off.points
    by_method = points_by_method(trade_off)
    names = []
    for point in points:
        for x, y in point.runs if len(point.setting.runs) > 1 else ():
            colour = styles[point.setting.method].hex
            axes.plot(sign[0] * x, sign[1] * y, ".", color=colour, markersize=2.5, alpha=0.55, zorder=2)
    for method in (one for one in styles if one in by_method):
        style, group = styles[method], by_method[method]
        for rates in _by_learning_rate(group):
            line = zip(*(_place(point, sign) for point in rates), strict=True)
            axes.plot(*line, color=style.hex, linewidth=0.8, alpha=0.45, zorder=2)
        for point in group:
            _draw_point(axes, point, sign, style, alpha=0.7 if len(points) <= MANY_SETTINGS else 0.35)
        names.append(Name(style.label, style.hex, [_place(point, sign) for point in group]))
    front = zip(*(_place(point, sign) for point in on_front(with_base(points, trade_off.base))), strict=True)
    axes.step(*front, where="pre", color=COLOURS["muted"], linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7, zorder=1)
    if trade_off.base is not None:
        _draw_point(axes, trade_off.base, sign, PRETRAINED, size=10)
        names.append(Name(PRETRAINED.label, PRETRAINED.hex, [_place(trade_off.base, sign)]))
    outside = _leave_out(axes, trade_off, sign)
    axes.xaxis.set_inverted(new.sign < 0)
    axes.yaxis.set_inverted(old.sign < 0)
    name_places(axes, reversed(names))
    intervals = f"Bars are 95% intervals over {trade_off.drawn}. " if trade_off.has_intervals else ""
    caption = (
        f"A marker is the mean of a setting's seeds, small dots are single runs. {intervals}"
        "Thin lines join a method's settings by learning rate. The dashed steps join the best settings: no other one learns more and forgets less."
    )
    if outside:
        those, verb = ("a setting", "it is") if outside == 1 else (f"{outside} settings", "they are")
        caption += f" Outside: {those} that the pretrained model beats on the new task and on the old ones; {verb} in the table."
    return save(figure, report.folder, "trade_off", "Learned against forgotten", caption)


def _draw_marker(axes: Axes, x: float, y: float, style: Style, **options: Any) -> None:
    axes.plot(x, y, marker=style.marker, linestyle="none", color=style.hex, **options)


def _place(point: Point, sign: tuple[int, int]) -> tuple[float, float]:
    return sign[0] * point.new.value, sign[1] * point.old.value


def _leave_out(axes: Axes, trade_off: TradeOff, sign: tuple[int, int]) -> int:
    """Ends the axes at the settings that the pretrained model does not beat, where the others would take much of them: how many are outside."""
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
    (left, right), (bottom, top) = limits
    places = [_place(one, sign) for one in points]
    return sum(not (left <= x <= right and bottom <= y <= top) for x, y in places)


def _extent(estimates: Sequence[Estimate], sign: int) -> tuple[float, float]:
    """Of the values and their intervals, as shown."""
    ends = [sign * one for each in estimates for one in (each.value, *(each.ends or ()))]
    return min(ends), max(ends)


def _draw_point(axes: Axes, point: Point, sign: tuple[int, int], style: Style, size: float = 6, **bars: Any) -> None:
    x, y = _place(point, sign)
    bars = {"color": style.hex, "linewidth": 1.0, "alpha": 0.7, "zorder": 3, **bars}
    if ends := point.new.ends:
        axes.plot([sign[0] * end for end in ends], [y, y], **bars)
    _draw_bar(axes, x, point.old, sign[1], **bars)
    _draw_marker(axes, x, y, style, markersize=size, **_EDGE, zorder=4)


def _draw_bar(axes: Axes, x: float, one: Estimate, factor: float, **options: Any) -> None:
    """The interval, shown times ``factor``."""
    if one.ends:
        axes.plot([x, x], [factor * end for end in one.ends], **options)


def _by_learning_rate(points: list[Point]) -> list[list[Point]]:
    """Settings that differ only in their learning rate, by it."""

    def others(point: Point) -> str:
        return str(sorted((key, str(value)) for key, value in point.setting.values.items() if key != LR))

    ordered = sorted(points, key=lambda point: (others(point), point.setting.values.get(LR) or 0))
    return [list(group) for _, group in groupby(ordered, key=others)]


def draw_front(report: Report) -> Drawing:
    front, styles, new, old = report.front, report.names.styles, report.new, report.old
    figure, axes = new_figure(3.9, f"at equal {new.label}\n{MORE_LEARNED}", _old_label(report))
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
            x, y = number + shift, old.sign * value.change.value
            _draw_bar(axes, x, value.change, old.sign, color=style.hex, linewidth=1.2, alpha=0.8)
            face = COLOURS["page"] if value.is_extrapolated else style.hex
            _draw_marker(axes, x, y, style, markerfacecolor=face, markersize=size, markeredgewidth=1.1)
            marks.append((x, y))
        axes.plot(*zip(*marks, strict=True), color=style.hex, linewidth=0.8, alpha=0.35, zorder=1)
        names.append(Name(style.label, style.hex, marks))
    for number in range(1, len(front.scores)):
        axes.axvline(number - 0.5, color=COLOURS["grid"], linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7)
    axes.set_xticks(range(len(front.scores)), [f"{new.sign * score:.{new.places}f}" for score in front.scores])
    axes.set_xlim(-0.5, len(front.scores) - 0.5)
    axes.yaxis.set_inverted(old.sign < 0)
    name_places(axes, names)
    caption = (
        "Each group compares methods where they have learned equally much. A method that does not reach a score is absent there. "
        "Hollow markers are guesses, on a straight line from the pretrained model: the method has no setting that learned so little."
    )
    return save(figure, report.folder, "front", "Forgetting at equal new-task score", caption)


def draw_reliability(
    report: Report,
    marks: Sequence[tuple[str, float, Estimate]],
    base: Estimate | None,
    levels: Mapping[str, float],
    measure: Measure,
) -> Drawing:
    """
    Args:
        marks: (method, new-task score, the measure's score) of each run; without a new task the second is the learning rate.
        levels: horizontal lines by their labels, such as chance, in the scores' unit.
    """
    new, styles = report.comparison.new, report.names.styles
    is_error = measure.unit == POINTS and not measure.is_higher_better
    y_label = measure.metric + (" x 100" if is_error else f", {measure.score_unit}")
    figure, axes = new_figure(3.6, "learning rate" if new is None else new.label, y_label)
    scale = measure.scale
    places: dict[str, list[tuple[float, float]]] = {}
    for method, x, score in marks:
        style = styles[method]
        _draw_bar(axes, x, score, scale, color=style.hex, linewidth=1.0, alpha=0.6)
        _draw_marker(axes, x, scale * score.value, style, markersize=5.5, **_EDGE)
        places.setdefault(method, []).append((x, scale * score.value))
    names = [Name(styles[method].label, styles[method].hex, those) for method, those in places.items()]
    lines = {text: ("muted", value) for text, value in levels.items()}
    if base is not None:
        if base.ends:
            axes.axhspan(*(scale * end for end in base.ends), color=COLOURS["muted"], alpha=0.15, linewidth=0)
        axes.axhline(scale * base.value, color=COLOURS["ink"], linewidth=1.2)
        lines["pretrained, 95%"] = "ink", base.value
    for value, pattern in zip(levels.values(), (":", "--"), strict=False):
        axes.axhline(scale * value, color=COLOURS["muted"], linewidth=1.0, linestyle=pattern)
    if new is None:
        axes.set_xscale("log")
    ends = axes.get_xlim()
    axes.set_xlim(ends)
    names += [Name(text, COLOURS[ink], [(x, scale * value) for x in ends]) for text, (ink, value) in lines.items()]
    name_places(axes, names)
    caption = "A marker per run, with its 95% interval; the band is the pretrained model's."
    caption += "" if measure.is_higher_better else " Lower is better."
    return save(figure, report.folder, f"reliability_{measure.name}", f"{measure.name}, {measure.metric}", caption)


def draw_calibration(answers: Sequence[tuple[Style, Answers]], folder: Path, chosen: str) -> Drawing:
    """
    Args:
        chosen: which runs are shown, for the caption.
    """
    figure, axes = new_figure(4.2, "stated confidence, %", "right answers, %")
    axes.plot([0, 100], [0, 100], color=COLOURS["muted"], linewidth=1.0, linestyle=":")
    names = [Name("calibrated", COLOURS["muted"], [(at, at) for at in range(10, 100, 10)])]
    for style, stated in answers:
        bins, counts = np.unique(bin_of := confidence_bins(stated[0]), return_counts=True)
        places = [tuple(100 * np.mean(stated, axis=1, where=bin_of == one)) for one in bins]
        axes.plot(*zip(*places, strict=True), color=style.hex, linewidth=1.1, alpha=0.7)
        for place, size in zip(places, 3 + 5 * (counts / counts.max()) ** 0.5, strict=True):
            axes.plot(*place, marker=style.marker, color=style.hex, markersize=size)
        names.append(Name(style.label, style.hex, places))
    axes.set(xlim=(-3, 103), ylim=(-3, 103))
    name_places(axes, names)
    caption = f"Answers in ten bins by their stated confidence; below the dotted line, a model is overconfident. Larger markers have more answers. {chosen}"
    return save(figure, folder, "calibration", "Stated confidence against accuracy", caption)


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most ``MAX_POINTS`` of the points, evenly spaced, the last one included: a page holds many curves."""
    chosen = sorted({*range(0, len(steps), math.ceil(len(steps) / MAX_POINTS)), len(steps) - 1})
    return [steps[index] for index in chosen], [values[index] for index in chosen]


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with those before it: a twentieth of the values, at most ``SMOOTHING_STEPS``."""
    width = max(1, min(SMOOTHING_STEPS, len(values) // 20))
    sums = np.convolve(values, np.ones(width))[: len(values)]
    return (sums / np.arange(1, len(values) + 1).clip(max=width)).tolist()


def draw_curves(
    report: Report,
    curves: Sequence[Curve],
    name: str,
    title: str,
    caption: str,
    label: str,
    *,
    x_label: str = "step",
    from_zero: bool = False,
    is_scientific: bool = False,
    is_inverted: bool = False,
) -> Drawing:
    """
    Args:
        curves: each of at least one step, with a few markers; their names stand where they end. The paper's are drawn of the report's methods.
        is_inverted: less is better, so that less is up.
    """
    from matplotlib.ticker import MaxNLocator

    styles = report.names.styles
    curves = [curve for curve in curves if curve.method in styles]
    figure, axes = new_figure(3.0, x_label, label)
    for curve in sorted(curves, key=lambda one: one.is_paper):
        style = styles[curve.method]
        steps, values = thin(curve.steps, curve.values)
        every = max(1, len(steps) // NUM_MARKERS)
        # Side by side where curves meet.
        first = list(styles).index(curve.method) * every // len(styles) if every > 1 else 0
        marks = {"marker": style.marker, "markevery": (first, every)}
        look: dict[str, Any] = {"label": style.label, "linewidth": 1.5, **marks}
        if curve.is_paper:
            look = {"label": f"{style.label}, paper", "linewidth": 0.9, "linestyle": ":"}
        axes.plot(steps, values, color=style.hex, markersize=4, alpha=0.8, **look)
    if from_zero:
        axes.set_ylim(bottom=0)
    if is_scientific:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.yaxis.get_offset_text().set(color=COLOURS["ink"], fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x_label == "step", steps=[1, 2, 5, 10]))
    axes.set_xlim(0, max((curve.steps[-1] for curve in curves), default=0) or 1)
    axes.yaxis.set_inverted(is_inverted)
    name_ends(axes)
    caption += " Dotted: the paper's Figure 1." if any(curve.is_paper for curve in curves) else ""
    return save(figure, report.folder, name, title, caption)
