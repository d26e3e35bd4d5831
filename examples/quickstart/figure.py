"""The paper's Figure 1 on a small scale: learning rate, and accuracy on the new and the old task, over steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.quickstart.evaluate import Scores
from finch.training.summary import tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#b5533c", "#2c6e8f", "#4c8a3f")


@dataclass(frozen=True)
class Curves:
    """A run: ``learning_rates[i]`` of step i + 1; ``scores``: step to the scores on "old" and "new" after it."""

    learning_rates: list[float]
    scores: dict[int, dict[str, Scores]]


def draw(runs: dict[str, Curves], averaged: dict[str, Scores], file: Path) -> None:
    """``averaged``: the last run's model averaged with the base model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, new, old) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    rate_ends: list[tuple[float, str, str]] = []
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=True):
        rates.plot(range(1, len(run.learning_rates) + 1), run.learning_rates, color=colour)
        rate_ends.append((run.learning_rates[-1], name, colour))
    _label_ends(rates, len(run.learning_rates), rate_ends)
    for axes, world in ((new, "new"), (old, "old")):
        ends: list[tuple[float, str, str]] = []
        for colour, (name, run) in zip(COLOURS, runs.items(), strict=True):
            steps = sorted(run.scores)
            values = [100 * run.scores[step][world].accuracy for step in steps]
            axes.plot(steps, values, marker="o", markersize=3, color=colour)
            ends.append((values[-1], name, colour))
        average = 100 * averaged[world].accuracy
        axes.plot(max(steps), average, "*", markersize=10, color=colour, markeredgecolor="white", zorder=3)
        _label_ends(axes, max(steps), [*ends, (average, "★ and the average", colour)])
        axes.set(xlabel="step", ylabel="exact match, %")
    rates.set(xlabel="step", title="Learning rate", ylim=(0, None))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    new.set(title="New facts: what is learned", ylim=(-3, 103))
    old.set_title("Old facts: what is kept")
    for axes in (rates, new, old):
        tidy(axes)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _label_ends(axes: Axes, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names lines where they end: value, text and colour of each. Names that would overlap are moved apart."""
    low, high = axes.get_ylim()
    gap = 0.075 * (high - low)
    ends = sorted(ends)
    places = [value for value, _, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gap)
    overshoot = max(0.0, places[-1] - high)
    places[-1] -= overshoot
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - gap)
    for place, (_, text, colour) in zip(places, ends, strict=True):
        axes.text(1.05 * x, place, text, color=colour, fontsize=9, va="center")
