"""What is kept over what is learned: a line per method through its epochs, as one reads a run's trade-off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from scipy.stats import binomtest

from examples.quickstart.evaluate import Scores
from finch.study.report.style import PRETRAINED, Name, method_styles, name_places, new_figure
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED


def draw(
    runs: Mapping[str, list[dict[str, Scores]]],
    averaged: Mapping[str, Scores],
    num_facts: Mapping[str, int],
    file: Path,
) -> None:
    """
    Args:
        runs: by method, the scores on "new" and "old" of the base model and after each epoch.
        averaged: of the last run's model averaged with the base model.
        num_facts: on each; Wilson's 95% interval over them is drawn at the last model of each line, which says nothing of other seeds.
    """
    styles = method_styles(runs)
    figure, axes = new_figure(
        4.4, f"new facts learned, % exact match; one seed\n{MORE_LEARNED}", f"old facts kept, %\n{LESS_FORGOTTEN}"
    )
    names = []
    for method, scores in runs.items():
        style = styles[method]
        places = [(100 * one["new"].accuracy, 100 * one["old"].accuracy) for one in scores]
        axes.plot(*zip(*places, strict=True), marker=style.marker, markersize=3, color=style.hex, linewidth=1.2)
        _last(axes, scores[-1], num_facts, style.marker, style.hex)
        names.append(Name(style.label, style.hex, places[-1:]))
    _last(axes, averaged, num_facts, "*", style.hex)
    place = 100 * averaged["new"].accuracy, 100 * averaged["old"].accuracy
    names.append(Name(f"{style.label}, averaged", style.hex, [place]))
    axes.plot(*places[0], marker=PRETRAINED.marker, color=PRETRAINED.hex, markersize=9)
    names.append(Name("base model", PRETRAINED.hex, places[:1]))
    name_places(axes, names)
    figure.savefig(file, dpi=150)


def _last(axes: Axes, scores: Mapping[str, Scores], num_facts: Mapping[str, int], marker: Any, color: str) -> None:
    """A large marker with an interval each way."""
    (x, x_bar), (y, y_bar) = (_percent(scores[world].accuracy, num_facts[world]) for world in ("new", "old"))
    axes.errorbar(x, y, y_bar, x_bar, fmt=marker, color=color, markersize=8, elinewidth=1, alpha=0.8)


def _percent(share: float, number: int) -> tuple[float, list[list[float]]]:
    """With the lengths of its interval's two sides."""
    ends = binomtest(round(share * number), number).proportion_ci(method="wilson")
    return 100 * share, [[100 * max(0.0, share - ends.low)], [100 * max(0.0, ends.high - share)]]
