"""The paper's Figure 1 on a small scale: learning rate, and accuracy on the new and the old task, over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.evaluate import Scores
from finch.study.report.style import method_styles
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED, name_ends, new_panels


@dataclass(frozen=True)
class Curves:
    """A run: ``learning_rates[i]`` of step i + 1; ``scores``: step to the scores on "old" and "new" after it."""

    learning_rates: list[float]
    scores: dict[int, dict[str, Scores]]


def draw(runs: Mapping[str, Curves], averaged: Mapping[str, Scores], file: Path) -> None:
    """
    Args:
        runs: by method.
        averaged: the last run's model averaged with the base model.
    """
    styles = method_styles(runs)
    figure, (rates, new, old) = new_panels((12, 3.4), 1, 3)
    for method, run in runs.items():
        style = styles[method]
        rates.plot(range(1, len(run.learning_rates) + 1), run.learning_rates, color=style.hex, label=style.label)
    rates.set(xlabel="step", title="Learning rate", ylim=(0, None))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes, world, arrow in ((new, "new", MORE_LEARNED), (old, "old", LESS_FORGOTTEN)):
        for method, run in runs.items():
            style, steps = styles[method], sorted(run.scores)
            values = [100 * run.scores[step][world].accuracy for step in steps]
            axes.plot(steps, values, color=style.hex, marker=style.marker, markersize=4, label=style.label)
        average = 100 * averaged[world].accuracy
        (star,) = axes.plot(steps[-1], average, "*", color=style.hex, markersize=11, markeredgecolor="white", zorder=3)
        star.set_label("\N{BLACK STAR} and the average")
        axes.set(xlabel="step", ylabel=f"exact match, %\n{arrow}")
    new.set(title="New facts: what is learned", ylim=(-3, 103))
    old.set_title("Old facts: what is kept")
    for axes in (rates, new, old):
        name_ends(axes)
    figure.savefig(file, dpi=150)
