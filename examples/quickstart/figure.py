"""The paper's Figure 1 on a small scale: learning rate, and accuracy on the new and the old task, over steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.evaluate import Scores
from finch.training.summary import tidy

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

    figure, (rates, accuracy) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=True):
        rates.plot(range(1, len(run.learning_rates) + 1), run.learning_rates, color=colour, label=name)
        steps = sorted(run.scores)
        for world, style, marker in (("new", "-", "o"), ("old", "--", "s")):
            values = [100 * run.scores[step][world].accuracy for step in steps]
            accuracy.plot(
                steps, values, style, marker=marker, markersize=3.5, color=colour, label=f"{name}, {world} task"
            )
    for world, marker in (("new", "*"), ("old", "P")):
        accuracy.plot(
            max(steps) * 1.06,
            100 * averaged[world].accuracy,
            marker,
            markersize=9,
            color=colour,
            label=f"its average, {world} task",
        )
    rates.set(xlabel="step", ylabel="learning rate", title="Learning rate")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set_ylim(bottom=0)
    rates.legend(frameon=False)
    accuracy.set(xlabel="step", ylabel="exact match, %", title="What is learned, what is kept", ylim=(-3, 103))
    # Next to the curves, which fill the panel
    accuracy.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 0.95))
    for axes in (rates, accuracy):
        tidy(axes)
    figure.savefig(file, dpi=160)
    plt.close(figure)
