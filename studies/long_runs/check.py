"""Derives comparisons.csv again, from points.csv, with numpy and none of finch's code; ends with an error where a number differs.

python -m studies.long_runs.check studies/long_runs/results
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_SCORES = 101
Array = NDArray[np.float64]
Runs = dict[tuple[str, str], Array]
"""By arm and rate: [seeds, 2], minus the loss that was learned and what was forgotten."""


def read(results: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((results / "points.csv").open()))


def runs_of(rows: list[dict[str, str]], arms: list[str], learned: str, forgotten: str) -> Runs:
    base = next(row for row in rows if row["arm"] == "pretrained")
    seeds = [{row["seed"] for row in rows if row["arm"] == arm and row["rate"] == rate} for arm, rate in settings(rows)]
    known = set.intersection(*seeds)
    return {
        (arm, rate): np.array(
            [
                (-float(row[learned]), float(row[forgotten]) - float(base[forgotten]))
                for row in sorted(rows, key=lambda row: row["seed"])
                if (row["arm"], row["rate"]) == (arm, rate) and row["seed"] in known
            ]
        )
        for arm, rate in settings(rows)
        if arm in arms
    }


def settings(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["arm"], row["rate"]) for row in rows if row["arm"] != "pretrained"))


def front(points: Array) -> Array:
    """The points that no other one beats, by rising score."""
    kept = [p for p in points if not any(q[0] >= p[0] and q[1] <= p[1] and tuple(q) != tuple(p) for q in points)]
    return np.array(sorted(map(tuple, kept)))


def means(runs: Runs) -> Array:
    return np.array([seeds.mean(axis=0) for seeds in runs.values()])


def shared_scores(one: Array, other: Array, base: Array) -> Array | None:
    low, high = -math.inf, math.inf
    for points in (one, other):
        kept = front(np.vstack([base, points]))
        if len(kept) == 1:
            return None
        low = max(low, kept[1][0] if tuple(kept[0]) == tuple(base) else points[:, 0].min())
        high = min(high, points[:, 0].max())
    return np.linspace(low, high, NUM_SCORES) if low <= high else None


def mean_log(one: Array, other: Array, base: Array, scores: Array) -> float:
    """Of the ratio; a score beyond one of the fronts is left out."""
    fronts = [front(np.vstack([base, points])) for points in (one, other)]
    values = [np.interp(scores, kept[:, 0], kept[:, 1], right=math.nan) for kept in fronts]
    logs = np.log(values[0] / values[1])
    known = logs[~np.isnan(logs)]
    return float(known.mean()) if len(known) else math.nan


def check(results: Path) -> int:
    """How many lines are the same."""
    every = read(results)
    lines = list(csv.DictReader((results / "comparisons.csv").open()))
    for line in lines:
        arms = [line[key].split("+") for key in ("one", "other")]
        rows = [
            row for row in every if row["runs"] == line["runs"] and row["arm"] in (*arms[0], *arms[1], "pretrained")
        ]
        one, other = (runs_of(rows, names, line["learned"], line["forgotten"]) for names in arms)
        base = np.array([-float(next(row for row in rows if row["arm"] == "pretrained")[line["learned"]]), 0.0])
        scores = shared_scores(means(one), means(other), base)
        assert scores is not None
        found = [mean_log(means(one), means(other), base, scores)]
        for seed in range(int(line["seeds"])):
            first, second = (np.array([seeds[seed] for seeds in runs.values()]) for runs in (one, other))
            found.append(mean_log(first, second, base, scores))
        for key in (*one, *other):
            fewer = [
                means({k: v for k, v in runs.items() if k != key}) if len(runs) > (key in runs) else None
                for runs in (one, other)
            ]
            if fewer[0] is not None and fewer[1] is not None:
                rest = shared_scores(fewer[0], fewer[1], base)
                if rest is not None:
                    found.append(mean_log(fewer[0], fewer[1], base, rest))
        for name, value in (("ratio", found[0]), ("smallest", np.nanmin(found)), ("largest", np.nanmax(found))):
            if not abs(math.exp(value) / float(line[name]) - 1) < 1e-3:
                raise SystemExit(f"{list(line.values())}: {name} is {line[name]}, found {math.exp(value):.5g}")
    return len(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    print(f"{check(parser.parse_args().results)} comparisons are the same")
