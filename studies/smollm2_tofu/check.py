"""Derives the study's numbers again, from the runs' own files, with numpy and none of finch's code; ends with an error where one differs.

python -m studies.smollm2_tofu.check out/study studies/smollm2_tofu/results

1. comparisons.csv: each pair's mean difference of forgetting at five equal scores.
2. metrics.jsonl against the samples: at the last step a run's probes, which the recipe evaluates with its own model code, have the losses
   that transformers gives the same rows of the exported folder.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUITES = {"tofu": "knowledge", "hellaswag": "forgetting", "winogrande": "forgetting"}  # all others: losses
SIGN = {"hellaswag": -1, "winogrande": -1}  # a lower accuracy is forgetting
PERCENT = ("tofu", "hellaswag", "winogrande")
PLACES = {"lowest_score": 2, "highest_score": 2, "difference": 4, "ratio": 4}
"""Decimals in comparisons.csv."""

Point = tuple[float, float]
"""Score on the new task, forgetting."""
Array = NDArray[np.float64]


def scores(folder: Path, task: str) -> list[float] | None:
    """Of each row of a task; None: the task was not evaluated."""
    path = folder / f"{SUITES.get(task, 'losses')}.{task}.jsonl"
    return [json.loads(line)["score"] for line in path.read_text().splitlines()] if path.exists() else None


def front(points: list[Point], at: Array) -> Array:
    """Forgetting at scores, by straight lines between the points that none beats."""
    kept = [one for one in points if not any(o[0] >= one[0] and o[1] <= one[1] and o != one for o in points)]
    kept.sort()
    return np.interp(at, [one[0] for one in kept], [one[1] for one in kept])


def settings(sweep: Path, new_task: str, measure: str) -> tuple[Point, dict[str, list[Point]]]:
    """The pretrained model's point, and each method's points, means over seeds."""
    groups: dict[tuple[str, float], list[Point]] = defaultdict(list)
    base_folder = {"losses": sweep / "base_losses"} | {
        suite: path.parent for suite in ("knowledge", "forgetting") for path in sweep.glob(f"base-*/{suite}.json")
    }
    base = {}
    for name in (new_task, measure):
        values_of_base = scores(base_folder[SUITES.get(name, "losses")], name)
        assert values_of_base is not None
        base[name] = float(np.mean(values_of_base))
    scale = 100 if new_task in PERCENT else -1  # of a loss less is more
    for cell in sorted(sweep.glob("*/cell.json")):
        values = json.loads(cell.read_text())["values"]
        new, old = (scores(cell.parent / "evaluation", name) for name in (new_task, measure))
        if new is None or old is None:
            continue
        method = values.get("label", values["method"])
        change = SIGN.get(measure, 1) * (np.mean(old) - base[measure]) * (100 if measure in PERCENT else 1)
        groups[method, values["optimizer.lr"]].append((scale * float(np.mean(new)), float(change)))
    methods: dict[str, list[Point]] = defaultdict(list)
    for (method, _), runs in groups.items():
        new_mean, change = np.mean(runs, axis=0).tolist()
        methods[method].append((new_mean, change))
    return (scale * base[new_task], 0.0), methods


def check_comparisons(study: Path, results: Path) -> int:
    lines = list(csv.DictReader((results / "comparisons.csv").open()))
    for line in lines:
        base, methods = settings(study / line["setting"], line["new"], line["measure"])
        one, other = methods[line["one"]], methods[line["other"]]
        low = max(min(point[0] for point in group) for group in (one, other))
        high = min(max(point[0] for point in group) for group in (one, other))
        at = np.linspace(low, high, 5)
        values, other_values = front([base, *one], at), front([base, *other], at)
        found = {
            "difference": (values - other_values).mean(),
            "lowest_score": min(abs(low), abs(high)),
            "highest_score": max(abs(low), abs(high)),
        }
        if line["ratio"]:
            found["ratio"] = np.exp(np.log(values / other_values).mean())
        for key, value in found.items():
            if not abs(value - float(line[key])) <= 0.6 * 10.0 ** -PLACES[key]:  # a NaN is no number
                raise SystemExit(
                    f"{line['setting']} {line['measure']} {line['one']} / {line['other']}: {key} is {line[key]}, found {value:.4f}"
                )
    return len(lines)


def check_probes(study: Path) -> tuple[int, float]:
    """How many values were compared, and the largest relative difference of a loss."""
    number, worst = 0, 0.0
    for metrics in sorted(study.glob("*/*/metrics.jsonl")):
        stories = metrics.parent / "evaluation" / "losses.stories.jsonl"
        if not stories.exists():
            continue
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        probes = [line for line in lines if "probe/stories/loss" in line]
        if not probes or (last := probes[-1])["step"] == 0:
            continue
        rows = [json.loads(line) for line in stories.read_text().splitlines()][:16]
        loss = sum(row["nats"] for row in rows) / sum(row["tokens"] for row in rows)
        worst = max(worst, abs(loss / last["probe/stories/loss"] - 1))
        number += 1
    if worst > 1e-4:
        raise SystemExit(f"a story loss differs by {worst:.1e} of itself")
    return number, worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    print(f"{check_comparisons(arguments.study, arguments.results)} comparisons are the same")
    number, worst = check_probes(arguments.study)
    print(f"{number} values of the probes are the same; the largest relative difference of a loss is {worst:.1e}")
