"""Writes docs/methods_tofu.png from benchmarks/results/methods_tofu.csv: accuracy and story loss of each method over its learning rates."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path
from statistics import fmean

from finch.study.report.style import PRETRAINED, Name, method_styles, name_places
from finch.training.style import COLOURS, LESS_FORGOTTEN, MORE_LEARNED, new_panels

ROOT = Path(__file__).parents[2]
CHANCE = 100 / 6


def main() -> None:
    with (ROOT / "benchmarks/results/methods_tofu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, (axes,) = new_panels((8, 5), 1, 1)
    styles = method_styles(dict.fromkeys(row["method"] for row in rows)) | {"pretrained": PRETRAINED}
    names = []
    for method, of_method in groupby(rows, key=lambda row: row["method"]):
        style, line = styles[method], []
        for _, seeds in groupby(of_method, key=lambda row: row["learning_rate"]):
            those = list(seeds)
            line.append(
                (100 * fmean(float(r["accuracy"]) for r in those), fmean(float(r["story_loss"]) for r in those))
            )
        axes.plot(*zip(*line, strict=True), color=style.hex, marker=style.marker, linewidth=1, markersize=6)
        names.append(Name(style.label, style.hex, line))
    axes.axvline(CHANCE, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    ticks = (1.5, 2, 3, 4, 5, 6)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_inverted(True)
    axes.set_xlabel(f"six-way accuracy on paraphrased questions, %; dotted: chance\n{MORE_LEARNED}")
    axes.set_ylabel(f"loss on stories, nats per token\n{LESS_FORGOTTEN}")
    name_places(axes, names)
    figure.savefig(ROOT / "docs/methods_tofu.png", dpi=150)


if __name__ == "__main__":
    main()
