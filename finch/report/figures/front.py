"""The front at equal new-task score, a marker and an interval for each method and score."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finch.report.figures.style import COLOURS, Drawing, Style, add_legend, label_axes, new_figure, save
from finch.report.front import Front

MANY = 7
"""Methods from whose number on markers are smaller."""


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
    figure, axes = new_figure(3.9)
    methods = [method for method in styles if method in front.methods]
    width = 0.7 / max(1, len(methods))
    size = 5.5 if len(methods) <= MANY else 4.5
    for order, method in enumerate(methods):
        style = styles[method]
        shift = (order - (len(methods) - 1) / 2) * width
        axes.plot([], [], marker=style.marker, linestyle="none", color=style.hex, markersize=6, label=style.label)
        for number, value in enumerate(front.methods[method]):
            if value.change is None:
                continue
            x, y = number + shift, sign[1] * value.change.value
            if value.change.low is not None and value.change.high is not None:
                ends = [sign[1] * value.change.low, sign[1] * value.change.high]
                axes.plot([x, x], ends, color=style.hex, linewidth=1.2, alpha=0.8)
            face = COLOURS["page"] if value.is_extrapolated else style.hex
            axes.plot(
                x,
                y,
                marker=style.marker,
                linestyle="none",
                color=style.hex,
                markerfacecolor=face,
                markersize=size,
                markeredgewidth=1.1,
            )
    for number in range(1, len(front.scores)):
        axes.axvline(number - 0.5, color=COLOURS["grid"], linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color=COLOURS["muted"], linewidth=0.7)
    axes.set_xticks(range(len(front.scores)), [f"{sign[0] * score:.{places}f}" for score in front.scores])
    axes.set_xlim(-0.5, len(front.scores) - 0.5)
    axes.yaxis.set_inverted(sign[1] < 0)
    label_axes(axes, f"at equal {new_label}", old_label)
    add_legend(figure)
    caption = (
        "Higher is better. Each group compares methods where they have learned equally much; a method that does not reach a score is absent there. "
        "Hollow: between the pretrained model and the method's mildest setting."
    )
    return save(figure, folder, "front", "Forgetting at equal new-task score", caption)
