"""The study's figures: the fronts of the primary measure, and the README's picture of them.

python -m studies.smollm2_tofu.figure    draws docs/forgetting.svg from what results/ holds
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finch.study.report.front import TradeOff, points_by_method
from finch.study.report.measures import Estimate
from finch.study.report.style import PRETRAINED, STYLES, Name, name_places, new_figure, write
from finch.training.style import COLOURS, LESS_FORGOTTEN, MORE_LEARNED, new_panels

Array = NDArray[np.float64]
LABELS = {
    "sft": "SFT, cosine",
    "constant": "constant rate",
    "finch": "FINCH",
    "wise_ft": "WiSE-FT of SFT",
    "kl": "SFT + KL penalty, 1 seed",
}
RESULTS = Path(__file__).parent / "results"
PICTURED = {  # in README's picture: of results.csv and shares.csv
    "sft": ("sft", "plain SFT, cosine"),
    "finch": ("finch", "FINCH"),
    "wise_ft": ("wise_ft", "averages of SFT"),
    "replay: self_replay, 0.3": ("self_replay", "self_replay, 128 answers"),
    "breadth: answers_1024_rows_16, 1": ("self_replay", "self_replay, 1,024 answers"),
}
BASE = 2.589, 0.0
"""The pretrained model's training loss and KL."""
_DARK = {
    "ink": "#e6e8eb",
    "muted": "#9aa3ad",
    "grid": "#353b43",
    "page": "#15181c",
    "vermilion": "#ff8a4c",
    "blue": "#5aa9ff",
    "violet": "#a48cff",
    "green": "#35c48f",
}
MOST_FORGOTTEN = 1.3
"""Nats per token; the largest rates are outside."""


def draw(by_score: TradeOff, by_loss: TradeOff, path: Path) -> None:
    """The fronts of the primary measure: KL over six-way accuracy, and over the loss of the learned answers."""
    figure, panels = new_panels((10, 4.4), 1, 2, sharey=True)
    for axes, points in zip(panels, (by_score, by_loss), strict=True):
        methods = points_by_method(points)
        names = []
        for method in (name for name in LABELS if name in methods):
            style = STYLES[method]
            ordered = sorted(methods[method], key=lambda point: -point.old.value)
            new, old = [abs(point.new.value) for point in ordered], [-point.old.value for point in ordered]
            axes.plot(new, old, marker=style.marker, color=style.hex, markersize=5, linewidth=1.2)
            bars: dict[str, Any] = {"yerr": _bars([point.old for point in ordered], -1)}
            if points is by_score:
                bars["xerr"] = _bars([point.new for point in ordered], 1)
            axes.errorbar(new, old, **bars, fmt="none", ecolor=style.hex, alpha=0.3, linewidth=1)
            places = [(x, y) for x, y in zip(new, old, strict=True) if y < MOST_FORGOTTEN]
            names.append(Name(LABELS[method], style.hex, places))
        if points.base is not None:
            place = abs(points.base.new.value), 0.0
            axes.plot(*place, marker=PRETRAINED.marker, color=PRETRAINED.hex, markersize=9)
            names.append(Name(PRETRAINED.label, PRETRAINED.hex, [place]))
        axes.set_ylim(MOST_FORGOTTEN, -0.05)
        axes.xaxis.set_inverted(points is by_loss)
        name_places(axes, names)
    panels[0].set_ylabel(f"KL from the pretrained model\non its own answers, nats per token\n{LESS_FORGOTTEN}")
    panels[0].set_xlabel(f"six-way accuracy on paraphrases, %\n{MORE_LEARNED}")
    panels[1].set_xlabel(f"loss of the trained answers, nats per token\n{MORE_LEARNED}")
    write(figure, path)


def draw_picture(path: Path) -> None:
    """KL over the loss of the learned answers, means over the stored seeds, with the pretrained model; colours follow the reader's screen."""
    points = _stored_points()
    figure, axes = new_figure(
        4.4, f"loss of the trained answers\n{MORE_LEARNED}", f"forgotten: KL, nats per token\n{LESS_FORGOTTEN}"
    )
    names = []
    for setting, (method, label) in PICTURED.items():
        style = STYLES[method]
        places = [point for point in sorted(points[setting], key=lambda point: point[1]) if point[1] < MOST_FORGOTTEN]
        axes.plot(*zip(*places, strict=True), marker=style.marker, color=style.hex, markersize=6, linewidth=1.5)
        names.append(Name(label, style.hex, places))
    axes.plot(*BASE, marker=PRETRAINED.marker, color=PRETRAINED.hex, markersize=11)
    names.append(Name("pretrained", PRETRAINED.hex, [BASE]))
    axes.set_ylim(MOST_FORGOTTEN, -0.06)
    axes.xaxis.set_inverted(True)
    name_places(axes, names)
    with tempfile.TemporaryDirectory() as folder:
        text = write(figure, Path(folder, path.stem))
    for name in _DARK:
        text = re.sub(f"{COLOURS[name]}\\b", f"var(--{name})", text, flags=re.IGNORECASE)
    light, dark = ("".join(f"--{name}: {colours[name]}; " for name in _DARK) for colours in (COLOURS, _DARK))
    sheet = f"<style>svg {{ {light}}} @media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }}</style>"
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).replace("#ffffff", "var(--page)")
    path.write_text(re.sub(r"(<svg [^>]*>)", lambda match: match[0] + sheet, text, count=1), encoding="utf-8")


def _stored_points() -> dict[str, list[tuple[float, float]]]:
    """(training loss, KL) of each setting's rates, means over seeds."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for name, columns in (
        ("results", ("method", "train", "own_answers_kl")),
        ("shares", ("setting", "training_loss", "kl")),
    ):
        with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                setting, loss, kl = (row[column] for column in columns)
                if kl and (name == "shares" or row["setting"] == "smooth"):
                    found[setting, row["optimizer.lr"]].append((float(loss), float(kl)))
    points = defaultdict(list)
    for (setting, _), pairs in found.items():
        points[setting].append((fmean(x for x, _ in pairs), fmean(y for _, y in pairs)))
    return points


def _bars(estimates: Sequence[Estimate], sign: int) -> Array:
    """[2, points] from each value, shown times ``sign``, down and up to the ends of its interval."""
    bars = []
    for one in estimates:
        ends = (0.0, 0.0) if one.low is None or one.high is None else (one.value - one.low, one.high - one.value)
        bars.append(ends[::sign])
    return np.array(bars).T.clip(0)


if __name__ == "__main__":
    draw_picture(Path(__file__).parents[2] / "docs" / "forgetting.svg")
