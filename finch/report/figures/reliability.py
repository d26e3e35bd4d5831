"""Reliability: scores on a reliability task against the new-task score, and a reliability diagram of stated confidences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finch.evaluation.statistics import confidence_bins
from finch.report.figures.style import COLOURS, Drawing, Style, add_legend, label_axes, new_figure, save
from finch.report.measures import Estimate


@dataclass(frozen=True)
class Mark:
    """A run: where it stands on the x axis, and its score."""

    method: str
    x: float
    score: Estimate


@dataclass(frozen=True)
class Answers:
    """Stated confidences in [0, 1], and whether the answers were right."""

    method: str | None
    confidences: Sequence[float]
    correct: Sequence[float]


def draw_scores(
    marks: Sequence[Mark],
    base: Estimate | None,
    levels: Sequence[tuple[float, str]],
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
        levels: horizontal lines with their labels, such as chance, in the scores' unit.
    """
    figure, axes = new_figure(3.6)
    labelled: set[str] = set()
    for mark in marks:
        style = styles[mark.method]
        if mark.score.low is not None and mark.score.high is not None:
            ends = [scale * mark.score.low, scale * mark.score.high]
            axes.plot([mark.x, mark.x], ends, color=style.hex, linewidth=1.0, alpha=0.6)
        axes.plot(
            mark.x,
            scale * mark.score.value,
            marker=style.marker,
            linestyle="none",
            color=style.hex,
            markersize=5.5,
            markeredgecolor=COLOURS["page"],
            markeredgewidth=0.5,
            label=None if mark.method in labelled else style.label,
        )
        labelled.add(mark.method)
    if base is not None:
        if base.low is not None and base.high is not None:
            axes.axhspan(scale * base.low, scale * base.high, color=COLOURS["muted"], alpha=0.15, linewidth=0)
        axes.axhline(scale * base.value, color=COLOURS["ink"], linewidth=1.2, label="pretrained, 95%")
    for (value, text), pattern in zip(levels, (":", "--", "-."), strict=False):
        axes.axhline(scale * value, color=COLOURS["muted"], linewidth=1.0, linestyle=pattern, label=text)
    if is_log:
        axes.set_xscale("log")
    label_axes(axes, x_label, y_label)
    add_legend(figure)
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
    figure, axes = new_figure(4.2)
    axes.plot([0, 100], [0, 100], color=COLOURS["muted"], linewidth=1.0, linestyle=":", label="calibrated")
    for one in answers:
        style = styles[one.method] if one.method is not None else Style("pretrained", "ink", "*")
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
        axes.plot([], [], marker=style.marker, color=style.hex, markersize=6, label=style.label)
    axes.set(xlim=(-3, 103), ylim=(-3, 103))
    label_axes(axes, "stated confidence, %", "right answers, %")
    add_legend(figure)
    caption = f"Answers in ten bins by their stated confidence; below the dotted line a model is overconfident. Larger markers stand for more answers. {chosen}"
    return save(figure, folder, "calibration", "Stated confidence against accuracy", caption)
