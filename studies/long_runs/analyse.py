"""Reads the runs and writes what the study reports: points.csv, comparisons.csv, steps.csv and the figures.

python -m studies.long_runs.analyse out/long_runs --out studies/long_runs/results

Fronts and ratios are those of `finch report`; README.md says how they are read.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finch.base.run_files import CELL, EVALUATION, METRICS, read_metrics
from finch.study.report.front import Point, compare_pair, seed_points
from finch.study.sweep.grid import EVALUATED, FINISHED
from studies.long_runs.figures import draw_fronts, draw_steps

FRONTS = ("300", LONG := "1125", "smollm2")
ROUNDING, STEPS, DECAY = "rounding", "steps", "decay"
PROBES = {
    "train": "probe/train/loss",
    "paraphrases": "probe/paraphrases/loss",
    "accuracy": "probe/paraphrases/accuracy",
    "own_kl": "probe/own/kl",
    "stories": "probe/stories/loss",
}
SCORES = {"train": "train", "paraphrases": "paraphrases", "own_kl": "own_answers_kl", "stories": "stories"}
"""Of score.py's results."""
LEARNED, FORGOTTEN = ("train", "paraphrases"), ("own_kl", "stories")
CONSTANTS = ("constant", "constant_mean")
PAIRS = (  # the one, the other: less forgetting of the one is a ratio below 1
    (("finch",), ("sft",)),
    (("finch",), CONSTANTS),
    (CONSTANTS, ("sft",)),
    (("constant_mean",), ("constant",)),
    (("finch",), ("constant_mean",)),
    (("cosine_cold",), ("sft",)),
    (("cosine_cold",), CONSTANTS),
    (("finch_decay",), ("finch",)),
    (("finch_decay",), ("sft",)),
    (("constant_decay",), CONSTANTS),
    (("constant_decay",), ("sft",)),
    (("finch_decay",), ("constant_decay",)),
    (("finch_cap",), ("finch",)),
    (("finch_cap",), CONSTANTS),
)
DTYPES = ("bf16", "bf16_stochastic")
ROUNDING_PAIRS = (
    *(((f"{arm}_{dtype}",), (arm,)) for dtype in DTYPES for arm in ("finch", "sft", "constant")),
    *(
        ((f"finch{end}",), (f"{other}{end}",))
        for other in ("sft", "constant")
        for end in ("", *map("_{}".format, DTYPES))
    ),
)

Row = dict[str, Any]
Arms = tuple[str, ...]


def analyse(study: Path, out: Path) -> None:
    """
    Args:
        study: the folder of the sweeps; one that is missing is left out.
        out: for the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    points = [row for name in FRONTS for row in read_points(study / name)]
    points += [{**row, "runs": LONG} for row in read_points(study / DECAY) if row["arm"] != "pretrained"]
    points += rounding_points(list(read_points(study / ROUNDING)), points)
    pairs = [
        row
        for name in (*FRONTS, ROUNDING)
        for row in compare(
            [each for each in points if each["runs"] == name], ROUNDING_PAIRS if name == ROUNDING else PAIRS
        )
    ]
    write(out / "points.csv", points)
    write(out / "comparisons.csv", pairs)
    draw_fronts(points, out)
    steps = list(read_steps(study / STEPS))
    if steps:
        write(out / "steps.csv", steps)
        draw_steps(steps, out)


def read_points(sweep: Path) -> Iterable[Row]:
    """Of each finished run what it has learned and forgotten at its last step; a line of its own for the pretrained model."""
    base: Row = {}
    for cell in sorted(path.parent for path in sweep.glob(f"*/{CELL}")):
        content = json.loads((cell / CELL).read_text())
        if content["status"] not in (FINISHED, EVALUATED):
            continue
        values, lines = content["values"], read_metrics(cell / METRICS)
        rates = [line["lr"] for line in lines if "lr" in line]
        run: Row = {
            "runs": sweep.name,
            "arm": values.get("label", values["method"]),
            "dtype": values.get("dtype", "fp32"),
            "rate": values["optimizer.lr"],
            "seed": values["seed"],
            "first_rate": rates[0],
            "mean_rate": sum(rates) / len(rates),
            "last_rate": rates[-1],
        }
        if (cell / EVALUATION).is_dir():
            found, pretrained = _scores(cell / EVALUATION), _scores(sweep / "base_losses")
        else:
            measured = [line for line in lines if PROBES["train"] in line]
            if not measured:  # of SmolLM2, and not scored yet
                continue
            found, pretrained = (
                {name: line[key] for name, key in PROBES.items()} for line in (measured[-1], measured[0])
            )
        if not base:
            base = {"runs": sweep.name, "arm": "pretrained", **pretrained}
            yield base
        yield {**run, **found}


def rounding_points(rounded: Sequence[Row], points: Sequence[Row]) -> list[Row]:
    """Runs in bf16, whose arms are named after it, and next to them the same runs in fp32."""
    same = {(row["arm"], row["rate"], row["seed"]) for row in rounded if row["arm"] != "pretrained"}
    exact = [row for row in points if row["runs"] == "300" and row["arm"] != "pretrained"]
    return [
        *({**row, "arm": f"{row['arm']}_{row['dtype']}" if "dtype" in row else row["arm"]} for row in rounded),
        *({**row, "runs": ROUNDING} for row in exact if (row["arm"], row["rate"], row["seed"]) in same),
    ]


def _scores(folder: Path) -> Row:
    tasks = json.loads((folder / "losses.json").read_text())["tasks"]
    return {name: tasks[task]["score"] for name, task in SCORES.items()}


def compare(points: Sequence[Row], pairs: Sequence[tuple[Arms, Arms]]) -> Iterable[Row]:
    """A line for each pair of families, what is learned and what is forgotten; of the seeds that both have in full."""
    for one, other in pairs:
        mine = [row for row in points if row["arm"] in (*one, *other)]
        rates = {(row["arm"], row["rate"]) for row in mine}
        seeds = [
            seed
            for seed in sorted({row["seed"] for row in mine})
            if {(row["arm"], row["rate"]) for row in mine if row["seed"] == seed} == rates
        ]
        if not seeds or not {row["arm"] for row in mine} >= {*one, *other}:
            continue
        for learned, forgotten in itertools.product(LEARNED, FORGOTTEN):
            start = next(row for row in points if row["arm"] == "pretrained")
            base = seed_points("pretrained", [[(-start[learned], 0.0)] * len(seeds)])[0]
            first, second = (settings(mine, arms, seeds, learned, forgotten, start[forgotten]) for arms in (one, other))
            pair = compare_pair(first, second, base)
            if pair.mean.ratio is None or pair.is_guess:
                continue
            ratio = pair.mean.ratio.value
            others = [*np.exp(pair.draws).tolist(), *(pair.ratios_without_one or ())]
            yield {
                "runs": points[0]["runs"],
                "one": "+".join(one),
                "other": "+".join(other),
                "learned": learned,
                "forgotten": forgotten,
                "seeds": len(seeds),
                "lowest_score": float(-pair.scores[-1]),
                "highest_score": float(-pair.scores[0]),
                "ratio": ratio,
                "smallest": min(ratio, *others),
                "largest": max(ratio, *others),
            }


def settings(
    points: Sequence[Row], arms: Sequence[str], seeds: Sequence[int], learned: str, forgotten: str, start: float
) -> list[Point]:
    """The settings of a family, one for each arm and rate; losses with a minus, so that more is better."""
    groups: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row in sorted(points, key=lambda row: row["seed"]):
        if row["arm"] in arms and row["seed"] in seeds:
            groups.setdefault((row["arm"], row["rate"]), []).append((-row[learned], start - row[forgotten]))
    return seed_points("+".join(arms), list(groups.values()))


def read_steps(sweep: Path) -> Iterable[Row]:
    """A line for each step of both runs."""
    for cell in sorted(path.parent for path in sweep.glob(f"*/{CELL}")):
        content = json.loads((cell / CELL).read_text())
        values = content["values"]
        if content["status"] not in (FINISHED, EVALUATED):
            continue
        for line in read_metrics(cell / METRICS):
            if "step_kl" in line:
                found = {key: line[key] for key in ("step", "lr", "loss", "update_norm", "step_kl")}
                yield {"arm": values.get("label", values["method"]), **found}


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of run.py")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    analyse(arguments.study, arguments.out)
