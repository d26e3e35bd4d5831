"""Curves over steps: learning rate, loss, eta * sqrt(loss), and the probes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finch.report.figures.style import COLOURS, Drawing, Style, add_legend, label_axes, new_figure, save, step_axis

MAX_POINTS = 300
SMOOTHING_STEPS = 20
NUM_MARKERS = 8  # a curve


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
    level: tuple[float, str] | None = None,
) -> Drawing:
    """
    Args:
        curves: with a few markers each, since methods share colours.
        level: a horizontal line and its label.
    """
    figure, axes = new_figure(3.4)
    labelled: set[tuple[str, bool]] = set()
    for curve in sorted(curves, key=lambda one: one.is_paper):
        style = styles[curve.method]
        steps, values = thin(curve.steps, curve.values)
        text = f"{style.label}, paper" if curve.is_paper else style.label
        every = max(1, len(steps) // NUM_MARKERS)
        first = (
            list(styles).index(curve.method) * every // len(styles) if every > 1 else 0
        )  # side by side where curves meet
        marks = {} if curve.is_paper else {"marker": style.marker, "markersize": 4, "markevery": (first, every)}
        axes.plot(
            steps,
            values,
            color=style.hex,
            linewidth=0.9 if curve.is_paper else 1.5,
            linestyle=":" if curve.is_paper else "-",
            alpha=0.8,
            label=None if (curve.method, curve.is_paper) in labelled else text,
            **marks,  # type: ignore[arg-type]
        )
        labelled.add((curve.method, curve.is_paper))
    if level is not None:
        axes.axhline(level[0], color=COLOURS["muted"], linewidth=1.0, linestyle="--", label=level[1])
    if from_zero:
        axes.set_ylim(bottom=0)
    if is_scientific:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.yaxis.get_offset_text().set(color=COLOURS["ink"], fontsize=9)
    step_axis(axes)
    label_axes(axes, "step", label)
    add_legend(figure)
    return save(figure, folder, name, title, caption)
