"""The trade-off: what is learned against what is forgotten, a point a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from finch.report.figures.style import COLOURS, Drawing, Style, add_legend, label_axes, new_figure, save
from finch.report.front import non_dominated
from finch.report.measures import Estimate
from finch.report.runs import LEARNING_RATE
from finch.report.settings import Point, TradeOff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 16
"""Settings from whose number on the bars of intervals are fainter."""
SMALL_SHARE = 0.6
"""Of an axis, for settings that the pretrained model does not beat."""


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
    figure, axes = new_figure(4.2)
    points = list(trade_off.points)
    by_method: dict[str, list[Point]] = {}
    for point in points:
        assert point.setting is not None
        by_method.setdefault(point.setting.method, []).append(point)
    for position, new, old in trade_off.runs:
        setting = points[position].setting
        if setting is not None and len(setting.runs) > 1:
            style = styles[setting.method]
            axes.plot(sign[0] * new, sign[1] * old, ".", color=style.hex, markersize=2.5, alpha=0.55, zorder=2)
    for method in (one for one in styles if one in by_method):
        style, group = styles[method], by_method[method]
        for rates in _by_learning_rate(group):
            x, y = [sign[0] * one.new.value for one in rates], [sign[1] * one.old.value for one in rates]
            axes.plot(x, y, color=style.hex, linewidth=0.8, alpha=0.45, zorder=2)
        for point in group:
            _draw_point(axes, point, sign, style, alpha=0.7 if len(points) <= MANY else 0.35)
        axes.plot([], [], marker=style.marker, linestyle="none", color=style.hex, markersize=6, label=style.label)
    every = [*points, trade_off.base] if trade_off.base is not None else points
    front = [
        every[index] for index in non_dominated([one.new.value for one in every], [one.old.value for one in every])
    ]
    axes.step(
        [sign[0] * one.new.value for one in front],
        [sign[1] * one.old.value for one in front],
        where="pre",
        color=COLOURS["muted"],
        linewidth=1.0,
        linestyle=(0, (4, 2)),
        zorder=1,
        label="not dominated",
    )
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7, zorder=1)
    if trade_off.base is not None:
        base = Style("pretrained", "ink", "*")
        _draw_point(axes, trade_off.base, sign, base, size=10)
        axes.plot([], [], "*", color=base.hex, markersize=9, label=base.label)
    outside = _leave_out(axes, trade_off, sign)
    for axis, invert in zip((axes.xaxis, axes.yaxis), sign, strict=True):
        axis.set_inverted(invert < 0)
    label_axes(axes, new_label, old_label)
    add_legend(figure)
    intervals = f"Bars are 95% intervals over {trade_off.drawn}. " if trade_off.has_intervals else ""
    caption = (
        f"Up and to the right is better. A marker is the mean of a setting's seeds, small dots are single runs. {intervals}"
        "Thin lines join a method's settings by learning rate. The dashed steps join the settings that no other one beats on both axes."
        + (
            f" Outside: {outside} settings that the pretrained model beats on both axes; they are in the table."
            if outside > 1
            else ""
        )
        + (
            " Outside: a setting that the pretrained model beats on both axes; it is in the table."
            if outside == 1
            else ""
        )
    )
    return save(figure, folder, "trade_off", "Learned against forgotten", caption)


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
    places = [(sign[0] * one.new.value, sign[1] * one.old.value) for one in points]
    return sum(any(not low <= at <= high for at, (low, high) in zip(place, limits, strict=True)) for place in places)


def _extent(estimates: Sequence[Estimate], sign: int) -> tuple[float, float]:
    """Of the values and their intervals, as shown."""
    ends = [sign * one for each in estimates for one in (each.value, each.low, each.high) if one is not None]
    return min(ends), max(ends)


def _draw_point(
    axes: Axes, point: Point, sign: tuple[int, int], style: Style, size: float = 6, alpha: float = 0.7
) -> None:
    x, y = sign[0] * point.new.value, sign[1] * point.old.value
    for one, other, is_vertical in ((point.new, y, False), (point.old, x, True)):
        if one.low is None or one.high is None:
            continue
        ends = [sign[is_vertical] * one.low, sign[is_vertical] * one.high]
        line = ([other, other], ends) if is_vertical else (ends, [other, other])
        axes.plot(*line, color=style.hex, linewidth=1.0, alpha=alpha, zorder=3)
    axes.plot(
        x,
        y,
        marker=style.marker,
        linestyle="none",
        color=style.hex,
        markersize=size,
        markeredgecolor=COLOURS["page"],
        markeredgewidth=0.5,
        zorder=4,
    )


def _by_learning_rate(points: list[Point]) -> list[list[Point]]:
    """Settings that differ in their learning rate alone, by it."""

    def others(point: Point) -> str:
        assert point.setting is not None
        return str(sorted((key, str(value)) for key, value in point.setting.values.items() if key != LEARNING_RATE))

    def learning_rate(point: Point) -> float:
        assert point.setting is not None
        return float(point.setting.values.get(LEARNING_RATE) or 0)

    ordered = sorted(points, key=lambda point: (others(point), learning_rate(point)))
    return [list(group) for _, group in groupby(ordered, key=others)]
