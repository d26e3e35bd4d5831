"""Derives the study's numbers again, from the runs' own files, with numpy and none of finch's code; ends with an error where one differs.

python -m studies.smollm2_tofu.check out/study studies/smollm2_tofu/results

1. comparisons.csv: each pair's ratios and differences at equal scores, and without any one rate. Intervals come from a bootstrap with other random
   numbers: their ends are the same to a sixth of the interval.
2. selection.csv: each method at its best rate, the same.
3. results.csv and the tables of stories260k: each run's scores and rates.
4. metrics.jsonl against the samples: at the last step a run's probes, which the recipe evaluates with its own model code, have the losses
   that transformers gives the same rows of the exported folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUITES = {"tofu": "knowledge", "hellaswag": "forgetting", "winogrande": "forgetting"}  # all others: losses
PERCENT = ("tofu", "hellaswag", "winogrande")
PRIMARY = "own_answers_kl"
DRAWS = 2_000
TOLERANCE = 1 / 6
"""Of an interval's length: two bootstraps of 2,000 draws differ at an end by a fiftieth of it, a standard deviation."""

Array = NDArray[np.float64]
Numbers = dict[str, float | tuple[float, float, float]]
"""What a line of a table should have, by column: a number, or one with the ends of its interval."""


@dataclass
class Points:
    """A method's settings, by rising rate: [1 + draws, settings] in row 0 the means, in the others the draws of a bootstrap."""

    rates: list[float]
    num_runs: list[int]  # of each rate
    new: Array
    forgotten: Array


def scores(folder: Path, task: str) -> list[float] | None:
    """Of each row of a task; None: the task was not evaluated."""
    path = folder / f"{SUITES.get(task, 'losses')}.{task}.jsonl"
    return [json.loads(line)["score"] for line in path.read_text().splitlines()] if path.exists() else None


def scores_of_base(sweep: Path, task: str) -> list[float]:
    suite = SUITES.get(task, "losses")
    folders = [sweep / "base_losses", *sorted(sweep.glob("base-*"))]
    return next(found for folder in folders if (found := scores(folder, task)) and (folder / f"{suite}.json").exists())


def read_points(sweep: Path, new_task: str, measure: str, *others: Path) -> tuple[Points, dict[str, Points]]:
    """The pretrained model, and each method: scores in percent or minus nats, forgetting in points or nats. ``others``: further sweeps, of
    whose cells those with self_replay are read once they are complete, named after sweep and strength."""
    runs: dict[str, dict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
    new: list[list[float]] = []
    old: list[list[float]] = []
    seeds: list[int] = []
    for cell in [cell for each in (sweep, *others) for cell in sorted(each.glob("*/cell.json"))]:
        values = json.loads(cell.read_text())["values"]
        folder, name = cell.parent / "evaluation", values.get("label", values["method"])
        of_new_task, of_measure = (scores(folder, each) for each in (new_task, measure))
        if of_new_task is None or of_measure is None:
            continue
        if cell.parents[1] != sweep:
            if "self_replay" not in values["method"] or None in (scores(folder, each) for each in ("tofu", PRIMARY)):
                continue
            name = f"{cell.parents[1].name}: {name}, {values.get('self_replay.strength', 0.3):g}"
        runs[name][values["optimizer.lr"]].append(len(seeds))
        new.append(of_new_task)
        old.append(of_measure)
        seeds.append(values["seed"])
    rng = np.random.default_rng(7)

    def draws(n: int) -> Array:
        """[1 + draws, n] how often each of n is taken; in row 0 once."""
        return np.concatenate([np.ones((1, n)), rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)])

    def means(rows: Array) -> Array:
        """[1 + draws, columns] of [rows, columns]."""
        return draws(len(rows)) @ rows / len(rows)

    scale = 100.0 if new_task in PERCENT else -1.0
    of_new = scale * means(np.array([*new, scores_of_base(sweep, new_task)]).T)
    sign = -100.0 if measure in PERCENT else 1.0  # a lower accuracy is forgetting
    of_old = sign * means((np.array(old) - np.array(scores_of_base(sweep, measure))).T)
    distinct = sorted(set(seeds))
    number = draws(len(distinct))
    methods = {}
    for method, rates in runs.items():
        columns = []
        for _, indices in sorted(rates.items()):
            weights = number[:, [distinct.index(seeds[index]) for index in indices]].astype(float)
            weights[weights.sum(axis=1) == 0] = 1
            weights /= weights.sum(axis=1, keepdims=True)
            k = len(indices)
            # So that the variance of few seeds is not too small.
            weights = 1 / k + math.sqrt(k / max(k - 1, 1)) * (weights - 1 / k)
            score = (weights * of_new[:, indices]).sum(axis=1).round(9)  # equal ones differ in their last bits
            columns.append((score.clip(0, 100) if scale > 0 else score, (weights * of_old[:, indices]).sum(axis=1)))
        counts = [len(rates[rate]) for rate in sorted(rates)]
        methods[method] = Points(sorted(rates), counts, *np.array(columns).transpose(1, 2, 0))
    return Points([], [], of_new[:, -1:], np.zeros((len(of_new), 1))), methods


def of_means(points: Points, left_out: int | None = None) -> Points:
    """Without the draws, and without one setting."""
    gone: list[int] = [] if left_out is None else [left_out]
    new, forgotten = (np.delete(table[:1], gone, axis=1) for table in (points.new, points.forgotten))
    return Points([], [], new, forgotten)


def on_front(new: Array, forgotten: Array) -> NDArray[np.bool_]:
    """[rows, points] the points that none beats; of equal ones the first."""
    n = new.shape[1]
    is_beaten = np.zeros(new.shape, dtype=bool)
    for i in range(n):
        for j in range(n):
            no_worse = (new[:, j] >= new[:, i]) & (forgotten[:, j] <= forgotten[:, i])
            is_same = (new[:, j] == new[:, i]) & (forgotten[:, j] == forgotten[:, i])
            is_beaten[:, i] |= (no_worse & ~is_same) | (is_same & (j < i))
    return ~is_beaten


def read(base: Points, points: Points, at: Array) -> Array:
    """[rows, scores] forgetting on the front of each row; NaN beyond its last point."""
    new, forgotten = (np.hstack(both) for both in ((base.new, points.new), (base.forgotten, points.forgotten)))
    is_kept = on_front(new, forgotten)
    found = np.empty((len(new), len(at)))
    for column, score in enumerate(at):  # along a front forgetting rises with the score
        below, above = is_kept & (new <= score), is_kept & (new >= score)
        left, right = np.where(below, new, -np.inf).max(axis=1), np.where(above, new, np.inf).min(axis=1)
        left_value = np.where(below, forgotten, -np.inf).max(axis=1)
        right_value = np.where(above, forgotten, np.inf).min(axis=1)
        with np.errstate(invalid="ignore"):
            share = np.where(right > left, (score - left) / (right - left), 1.0)
            value = np.where(np.isfinite(left), left_value + share * (right_value - left_value), right_value)
        found[:, column] = np.where(right == left, right_value, np.where(np.isfinite(right), value, np.nan))
    return found


def common(base: Points, one: Points, other: Points) -> tuple[float, float]:
    """The scores of the means, from where both have settings on their front, or have beaten the pretrained model, to the highest of both."""
    starts = []
    for points in (one, other):
        new, forgotten = (np.hstack(both)[:1] for both in ((base.new, points.new), (base.forgotten, points.forgotten)))
        is_kept = on_front(new, forgotten)[0]
        starts.append(new[0, 1:][is_kept[1:]].min() if is_kept[0] else new[0, 1:].min())
    return max(starts), min(points.new[0].max() for points in (one, other))


def with_interval(column: Array) -> tuple[float, float, float]:
    """The first row, and the 2.5% and 97.5% percentiles of the others."""
    low, high = np.nanquantile(column[1:], (0.025, 0.975))
    return float(column[0]), float(low), float(high)


def mean_of_known(table: Array) -> Array:
    """[rows]; NaN where a row has none."""
    number = (~np.isnan(table)).sum(axis=1)
    return np.where(number > 0, np.nansum(table, axis=1) / np.maximum(number, 1), np.nan)


def compare(base: Points, one: Points, other: Points, num_scores: int) -> dict[str, Array]:
    """[rows] mean difference, mean log of the ratio, and the log at the lowest and the highest score; in row 0 of the means."""
    at = np.linspace(*common(base, one, other), num_scores).round(9)
    values, other_values = read(base, one, at), read(base, other, at)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0, a score that the pretrained model has, is left out
        log = np.log(values.clip(0)) - np.log(other_values.clip(0))
    means = {"difference": mean_of_known(values - other_values), "ratio": mean_of_known(log)}
    has_ratio = min(values[0].min(), other_values[0].min()) > 0
    return means | {"lowest": log[:, 0], "highest": log[:, -1], "has_ratio": np.array([has_ratio])}


def differs(line: Mapping[str, str], expected: Numbers) -> str | None:
    """What of a line is not as expected."""
    for key, one in expected.items():
        value, *ends = one if isinstance(one, tuple) else (one,)
        places = len(line[key].rpartition(".")[2]) if "." in line[key] else 0
        if not line[key] or not abs(value - float(line[key])) <= 0.6 * 10.0**-places:  # a NaN is no number
            return f"{key} is {line[key] or 'missing'}, found {value:.4f}"
        for suffix, end in zip(("low", "high"), ends, strict=False):
            text = line[f"{key}_{suffix}"]
            if not text or not abs(end - float(text)) <= TOLERANCE * (ends[1] - ends[0]) + 1e-4:
                return f"{key}_{suffix} is {text or 'missing'}, found {end:.4f}"
    return None


def check_comparisons(study: Path, results: Path) -> int:
    lines = list(csv.DictReader((results / "comparisons.csv").open()))
    known: dict[tuple[str, str, str], tuple[Points, dict[str, Points]]] = {}
    for line in lines:
        key = (line["setting"], line["new"], line["measure"])
        if key not in known:
            known[key] = read_points(study / key[0], key[1], key[2])
        base, methods = known[key]
        one, other = methods[line["one"]], methods[line["other"]]
        low, high = common(base, one, other)
        found, five = compare(base, one, other, 101), compare(base, one, other, 5)
        expected: Numbers = {
            "lowest_score": min(abs(low), abs(high)),
            "highest_score": max(abs(low), abs(high)),
            "runs_of_one": sum(one.num_runs),
            "runs_of_other": sum(other.num_runs),
            "difference": with_interval(found["difference"]),
            "five_difference": with_interval(five["difference"]),
        }
        if line["ratio"]:
            expected["ratio"], expected["five_ratio"] = (with_interval(np.exp(each["ratio"])) for each in (found, five))
        elif line["measure"] == PRIMARY and found["has_ratio"][0]:
            expected["ratio"] = with_interval(np.exp(found["ratio"]))
        for end in ("lowest", "highest"):
            if line[f"ratio_at_{end}"]:
                expected[f"ratio_at_{end}"] = math.exp(found[end][0])
        if line["ratio_without_a_rate_low"]:
            ratios = []
            sizes = (one.new.shape[1], other.new.shape[1])
            cuts = [(number, None) for number in range(sizes[0])] + [(None, number) for number in range(sizes[1])]
            start = of_means(base)
            for cut in cuts:
                both = of_means(one, cut[0]), of_means(other, cut[1])
                if min(points.new.shape[1] for points in both) and np.less_equal(*common(start, *both)):
                    each = compare(start, *both, 101)
                    ratios += [math.exp(each["ratio"][0])] if each["has_ratio"][0] else []
            expected["ratio_without_a_rate_low"], expected["ratio_without_a_rate_high"] = min(ratios), max(ratios)
        if wrong := differs(line, expected):
            raise SystemExit(f"{line['setting']} {line['measure']} {line['one']} / {line['other']}: {wrong}")
    return len(lines)


def check_selection(study: Path, results: Path) -> int:
    lines = list(csv.DictReader((results / "selection.csv").open()))
    reference: dict[str, Any] = {}
    for line in lines:
        sweep = study / line["setting"]
        what = f"{line['setting']}, selection by {line['selected_by']}, {line['method']}"
        _, methods = read_points(sweep, line["selected_by"], PRIMARY)
        points, sign = methods[line["method"]], 1 if line["selected_by"] in PERCENT else -1
        drawn = points.new.argmax(axis=1)
        drawn[0] = next(number for number, score in enumerate(points.new[0]) if score > points.new[0].max() - 1e-9)
        rows = np.arange(len(drawn))
        best, kl = points.new[rows, drawn], np.log(points.forgotten[rows, drawn])
        expected: Numbers = {"optimizer.lr": points.rates[drawn[0]], "score": sign * best[0], PRIMARY: math.exp(kl[0])}
        if line["method"] == "sft":
            reference = {"score": best, "kl": kl}
        else:
            expected["score_minus_sft"] = with_interval(sign * (best - reference["score"]))
            ratio = np.exp(kl - reference["kl"])
            mean = math.exp(float((kl - reference["kl"])[1:].mean()))
            ratio[0] = float(line["kl_over_sft"])
            expected["kl_over_sft"] = with_interval(ratio)
            if not abs(mean / ratio[0] - 1) <= 0.03:  # a mean over draws, which differ
                raise SystemExit(f"{what}: kl_over_sft, found {mean:.4f}")
        if line["hellaswag"]:
            _, accuracies = read_points(sweep, line["selected_by"], "hellaswag")
            change = -accuracies[line["method"]].forgotten
            position = accuracies[line["method"]].rates.index(points.rates[drawn[0]])
            expected["hellaswag"] = float(change[0, position])
            if line["hellaswag_drawn"]:
                found = float(change[rows, drawn][1:].mean())
                if abs(found - float(line["hellaswag_drawn"])) > 0.3:  # points; draws differ
                    raise SystemExit(f"{what}: hellaswag_drawn, found {found:.4f}")
        shares = dict(each.split() for each in line["share_of_draws"].split(", "))
        for number, rate in enumerate(points.rates):
            found = 100 * float((drawn[1:] == number).mean())
            if abs(found - float(shares.get(f"{rate:g}", "0%").rstrip("%"))) > 6:
                raise SystemExit(f"{what}: {rate:g} is the best in {found:.1f}% of draws")
        if wrong := differs(line, expected):
            raise SystemExit(f"{what}: {wrong}")
    return len(lines)


def check_runs(study: Path, results: Path) -> int:
    """results.csv, precision.csv and blocks_stories260k.csv."""
    number = 0
    for path in (results / f"{name}.csv" for name in ("results", "precision", "blocks_stories260k")):
        lines = list(csv.DictReader(path.open())) if path.exists() else []
        cells: dict[tuple[str, str, float, int], Path] = {}
        for cell in study.glob("*/*/cell.json"):
            values = json.loads(cell.read_text())["values"]
            method = values.get("label", values["method"])
            cells[cell.parents[1].name, method, values["optimizer.lr"], values["seed"]] = cell.parent
        for line in lines:
            key = (line.get("setting", path.stem), line["method"], float(line["optimizer.lr"]), int(line["seed"]))
            metrics = cells[key] / "metrics.jsonl"
            logged = [json.loads(each) for each in metrics.read_text().splitlines()] if metrics.exists() else []
            steps = [each for each in logged if "lr" in each and "loss" in each]
            probes = [each for each in logged if "probe/stories/loss" in each]
            expected: Numbers = {}
            if "accuracy" in line:
                expected["accuracy"] = probes[-1]["probe/paraphrases/accuracy"]
                expected["stories_rise"] = probes[-1]["probe/stories/loss"] - probes[0]["probe/stories/loss"]
            elif line["mean_lr"]:
                rates = [each["lr"] for each in steps]
                for column, value in (("first_lr", rates[0]), ("mean_lr", np.mean(rates)), ("last_lr", rates[-1])):
                    if abs(float(line[column]) - value) > 6e-4 * abs(value):
                        raise SystemExit(f"{key}: {column} is {line[column]}, found {value:.4g}")
            for task in (*SUITES, PRIMARY, "own_answers", "stories", "train", "paraphrases", "held_out"):
                if line.get(task):
                    found = scores(cells[key] / "evaluation", task)
                    expected[task] = float(np.mean(found)) if found else math.nan
            if wrong := differs(line, expected):
                raise SystemExit(f"{path.name} {key}: {wrong}")
        number += len(lines)
    return number


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
    print(f"{check_selection(arguments.study, arguments.results)} selections are the same")
    print(f"{check_runs(arguments.study, arguments.results)} runs are the same")
    number, worst = check_probes(arguments.study)
    print(f"{number} values of the probes are the same; the largest relative difference of a loss is {worst:.1e}")
