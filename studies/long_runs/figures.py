"""The figures: fronts of what is forgotten over what is learned, and the steps of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from finch.study.report.style import Name, method_styles, name_places, write
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED, name_ends, new_panels

ARMS = {
    "sft": "cosine",
    "finch_cap": "FINCH, cap 1e-3",
    "finch_decay": "FINCH, decay",
    "constant_mean": "constant, mean rate",
    "constant_decay": "constant, decay",
    "constant": "constant, early rate",
    "finch": "FINCH",
}
TITLES = {
    "300": "stories260k, 300 steps",
    "1125": "stories260k, 1,125 steps",
    "smollm2": "SmolLM2-135M, 300 steps",
}


def draw_fronts(points: Sequence[dict[str, Any]], out: Path) -> None:
    """fronts.png: a panel for each set of runs, means over seeds."""
    from matplotlib.ticker import LogLocator, NullLocator

    sets = [name for name in TITLES if any(row["runs"] == name for row in points)]
    figure, panels = new_panels((4.7 * len(sets), 4.2), 1, len(sets))
    for axes, name in zip(panels, sets, strict=True):
        names = []
        for arm, style in method_styles(ARMS).items():
            places = []
            rows = [row for row in points if row["runs"] == name and row["arm"] == arm]
            for rate in sorted({row["rate"] for row in rows}):
                same = [row for row in rows if row["rate"] == rate]
                places.append((fmean(row["train"] for row in same), fmean(row["own_kl"] for row in same)))
            if places:
                axes.plot(*zip(*places, strict=True), color=style.hex, marker=style.marker, markersize=5, linewidth=1.2)
                names.append(Name(ARMS[arm], style.hex, places))
        axes.set_title(TITLES[name], fontsize=10)
        axes.set_xlabel(f"loss of the learned rows, nats per token\n{MORE_LEARNED}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter("{x:g}")
        axes.xaxis.set_inverted(True)
        axes.yaxis.set_inverted(True)
        name_places(axes, names)
    panels[0].set_ylabel(f"KL on own answers, nats per token\n{LESS_FORGOTTEN}")
    write(figure, out / "fronts")


def draw_steps(steps: Sequence[dict[str, Any]], out: Path) -> None:
    """steps.png: the learning rate, the update's norm and the KL between consecutive models, over steps."""
    kinds = {"lr": "learning rate", "update_norm": "norm of the update", "step_kl": "KL of one step, nats per token"}
    figure, panels = new_panels((12, 3.4), 1, len(kinds))
    for axes, (key, title) in zip(panels, kinds.items(), strict=True):
        for arm in dict.fromkeys(row["arm"] for row in steps):
            style = method_styles(ARMS)[arm]
            line = [(row["step"], row[key]) for row in steps if row["arm"] == arm]
            axes.plot(*zip(*line, strict=True), color=style.hex, label=ARMS[arm], linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        if key == "step_kl":
            axes.set_yscale("log")
            axes.yaxis.set_inverted(True)
            axes.set_ylabel(LESS_FORGOTTEN)
        name_ends(axes)
    write(figure, out / "steps")
