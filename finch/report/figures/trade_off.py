"""The trade-off: what is learned against what is forgotten, a point a setting."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from finch.report.figures.style import COLOURS, Drawing, Style, add_legend, label_axes, new_figure, save
from finch.report.front import non_dominated
from finch.report.runs import LEARNING_RATE
from finch.report.settings import Point, TradeOff

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
            _draw_point(axes, point, sign, style)
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
    for axis, invert in zip((axes.xaxis, axes.yaxis), sign, strict=True):
        axis.set_inverted(invert < 0)
    label_axes(axes, new_label, old_label)
    add_legend(figure)
    intervals = f"Bars are 95% intervals over {trade_off.drawn}. " if trade_off.has_intervals else ""
    caption = (
        f"Up and to the right is better. A marker is the mean of a setting's seeds, small dots are single runs. {intervals}"
        "Thin lines join a method's settings by learning rate. The dashed steps join the settings that no other one beats on both axes."
    )
    return save(figure, folder, "trade_off", "Learned against forgotten", caption)


def _draw_point(axes: Axes, point: Point, sign: tuple[int, int], style: Style, size: float = 6) -> None:
    x, y = sign[0] * point.new.value, sign[1] * point.old.value
    for one, other, is_vertical in ((point.new, y, False), (point.old, x, True)):
        if one.low is None or one.high is None:
            continue
        ends = [sign[is_vertical] * one.low, sign[is_vertical] * one.high]
        line = ([other, other], ends) if is_vertical else (ends, [other, other])
        axes.plot(*line, color=style.hex, linewidth=1.0, alpha=0.7, zorder=3)
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
