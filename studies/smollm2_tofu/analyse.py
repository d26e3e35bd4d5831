"""Reads the sweeps' evaluations and writes what the study reports: results.csv, comparisons.csv and .md, selection.csv and .md, and the figures.

python -m studies.smollm2_tofu.analyse out/study --out studies/smollm2_tofu/results

The protocol, and what each number means: README.md. Points, their bootstrap and fronts are those of `finch report`.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finch.evaluation.results import POINTS
from finch.study.report.front import (
    Pair,
    Point,
    TradeOff,
    compare_pair,
    group_settings,
    interval,
    points_by_method,
    trade_off,
)
from finch.study.report.measures import Comparison, Estimate, compare
from finch.study.report.runs import Run, read_runs, sort_runs
from finch.study.report.selection import Measure
from finch.study.sweep.grid import FINISHED
from studies.smollm2_tofu.figure import draw

SETTINGS = ("smooth", "blocks", "wrong", "quick")
PROBED = ("precision", "blocks_stories260k")
"""Sweeps of stories260k, whose probes at the last step are all that is measured."""
NEW = "tofu"
EXPLORATORY = "train"
"""Not in the protocol: the loss of the learned answers in place of the six-way accuracy, which is noisy and has a ceiling."""
PRIMARY = "own_answers_kl"
ACCURACY = "hellaswag"
OLD = (PRIMARY, "own_answers", "stories", ACCURACY, "winogrande")
OTHERS = ("train", "paraphrases", "held_out")
NUM_SCORES = 5
"""The protocol's; the report's ratios are of 101."""
REFERENCE = "sft"
SELECTED = ("finch", "constant", "wise_ft", "kl")
SELECTED_BY = (NEW, "paraphrases", "held_out")
TIE = 1e-9
"""Scores that differ by less are equal."""
PAIRS = (  # the one, the other: less forgetting of the one is a ratio below 1
    ("finch", "sft"),
    ("constant", "sft"),
    ("finch", "constant"),
    ("finch", "mean_rate"),
    ("finch", "linear_ramp"),
    ("finch", "replayed_curve"),
    ("finch_cap_5e-5", "finch"),
    ("wise_ft", "sft"),
    ("wise_ft", "finch"),
    ("wise_ft", "constant"),
    ("kl", "sft"),
    ("kl", "finch"),
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """Two methods' forgetting at equal new-task score.

    Attributes:
        new: the task of the score.
        pair: over 101 scores.
        protocol: over five.
        num_runs: of both methods.
    """

    setting: str
    new: str
    measure: str
    one: str
    other: str
    pair: Pair
    protocol: Pair
    num_runs: tuple[int, int]

    @property
    def scores(self) -> list[float]:
        """The lowest and the highest, in percent or nats: a loss has the sign of a score here."""
        return sorted((abs(self.pair.scores[0]), abs(self.pair.scores[-1])))


def analyse(study: Path, out: Path) -> None:
    """
    Args:
        study: the folder of the sweeps; a setting without any is left out.
        out: for the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    pairs: list[Compared] = []
    rows: list[dict[str, object]] = []
    selected: list[dict[str, object]] = []
    fronts: dict[str, tuple[TradeOff, TradeOff]] = {}
    for setting in SETTINGS:
        if not any((study / setting).glob("*/evaluation/*.json")):
            continue
        comparison = compare(sort_runs(read_runs([study / setting])), new_task=NEW)
        rows += [_row(setting, comparison, number) for number in range(len(comparison.runs))]
        for name in OLD:
            measure = next((one for one in (*comparison.old, *comparison.other_old) if one.name == name), None)
            if measure is None:
                continue
            points = _trade_off(comparison, measure)
            pairs += [pair for names in PAIRS if (pair := _compare(setting, NEW, measure, points, names))]
            if name in (PRIMARY, "stories"):
                by_loss = _trade_off(compare(comparison.runs, new_task=EXPLORATORY), measure)
                pairs += [pair for names in PAIRS if (pair := _compare(setting, EXPLORATORY, measure, by_loss, names))]
                if name == PRIMARY:
                    fronts[setting] = points, by_loss
        for name in SELECTED_BY:
            selected += select(setting, compare(comparison.runs, new_task=name))
    _write_csv(out / "results.csv", rows)
    _write_csv(out / "comparisons.csv", [_flat(pair) for pair in pairs])
    _write_csv(out / "selection.csv", selected)
    for name in PROBED:
        if any((study / name).glob("*/metrics.jsonl")):
            _write_csv(out / f"{name}.csv", probe_rows(study / name))
    for setting, both in fronts.items():
        draw(*both, out / f"front_{setting}")


def probe_rows(sweep: Path) -> list[dict[str, object]]:
    """Of each finished run its probes at the last step: accuracy, and the rise of the stories' loss in nats per token."""
    rows: list[dict[str, object]] = []
    for run in sort_runs(read_runs([sweep])):
        probes = [line for line in run.metrics if "probe/stories/loss" in line]
        if len(probes) < 2 or probes[-1]["step"] < len(run.steps) or run.status != FINISHED:
            continue
        rows.append(
            {
                "method": run.method,
                "dtype": run.values.get("dtype", "fp32"),
                "optimizer.lr": run.learning_rate,
                "seed": run.seed,
                "accuracy": f"{probes[-1]['probe/paraphrases/accuracy']:.4f}",
                "stories_rise": f"{probes[-1]['probe/stories/loss'] - probes[0]['probe/stories/loss']:.4f}",
            }
        )
    return rows


def _trade_off(comparison: Comparison, measure: Measure) -> TradeOff:
    cut = replace(comparison, old=[measure], other_old=[])
    return trade_off(cut, group_settings(cut))


def _compare(setting: str, new: str, measure: Measure, points: TradeOff, names: tuple[str, str]) -> Compared | None:
    one, other = names
    methods = points_by_method(points)
    if one not in methods or other not in methods or points.base is None:
        return None
    both = (methods[one], methods[other])
    pair = compare_pair(*both, points.base)
    if pair.is_guess or len(pair.scores) == 1:
        return None
    protocol = compare_pair(*both, points.base, num_scores=NUM_SCORES)
    if measure.unit == POINTS:  # of a few points of accuracy, which may rise, a quotient says nothing
        pair, protocol = (_without_ratio(each) for each in (pair, protocol))
    counts = [sum(len(point.runs) for point in group) for group in both]  # runs that have both scores
    return Compared(setting, new, measure.name, one, other, pair, protocol, (counts[0], counts[1]))


def _without_ratio(pair: Pair) -> Pair:
    readings = {name: replace(getattr(pair, name), ratio=None) for name in ("mean", "lowest", "highest")}
    return replace(pair, **readings, without_one=[replace(one, ratio=None) for one in pair.without_one])


def select(setting: str, comparison: Comparison) -> list[dict[str, object]]:
    """What a comparison of methods at their own best rates would say: each at its rate with the best score, the smallest of equal ones.

    Args:
        comparison: by the score that selects; a method with a rate that lacks it is left out.

    Returns:
        Of each method that rate and what it has there, by means over seeds; how often each rate is the best one in the draws of the bootstrap; and
        with each draw's best rate, the score less the reference's, the KL over the reference's, a geometric mean, and HellaSwag's mean change.
    """
    new = comparison.new
    old = {one.name: one for one in (*comparison.old, *comparison.other_old) if one.name in (PRIMARY, ACCURACY)}
    if new is None or PRIMARY not in old:
        return []
    points = {name: points_by_method(_trade_off(comparison, measure)) for name, measure in old.items()}
    num_settings = Counter(one.method for one in group_settings(comparison))
    rows: list[dict[str, object]] = []
    reference: tuple[float, Array, Array] | None = None
    for method in (REFERENCE, *SELECTED):
        groups = {name: sorted(methods.get(method, []), key=_rate) for name, methods in points.items()}
        group = groups[PRIMARY]
        if len(group) < max(2, num_settings[method]):
            continue
        highest = max(point.new.value for point in group)
        best = next(point for point in group if point.new.value > highest - TIE)
        drawn = np.stack([point.new_draws for point in group], axis=1).argmax(axis=1)
        counts = zip(group, np.bincount(drawn, minlength=len(group)), strict=True)
        row: dict[str, object] = {
            "setting": setting,
            "selected_by": new.name,
            "method": method,
            "optimizer.lr": _rate(best),
            "share_of_draws": ", ".join(f"{_rate(one):g} {count / len(drawn):.1%}" for one, count in counts if count),
            "score": f"{new.sign * best.new.value:.4f}",
        }
        for name in (PRIMARY, ACCURACY):
            same = [point for point in groups.get(name, []) if _rate(point) == _rate(best)]
            row[name] = f"{old[name].sign * same[0].old.value:.4f}" if same else ""
        score, kl = _of_draws(group, "new_draws", drawn), np.log(-_of_draws(group, "old_draws", drawn))
        accuracies = groups.get(ACCURACY, [])
        is_whole = len(accuracies) == len(group)
        row[f"{ACCURACY}_drawn"] = f"{_of_draws(accuracies, 'old_draws', drawn).mean():.4f}" if is_whole else ""
        reference = reference or (best.new.value, score, kl)
        difference = Estimate(best.new.value - reference[0], *interval(score - reference[1])).times(new.sign)
        ratio = np.exp([(kl - reference[2]).mean(), *np.quantile(kl - reference[2], (0.025, 0.975))])
        is_reference = method == REFERENCE
        row |= _numbers(f"score_minus_{REFERENCE}", None if is_reference else difference)
        row |= _numbers(f"kl_over_{REFERENCE}", None if is_reference else Estimate(ratio[0], 0.0, ratio[1], ratio[2]))
        rows.append(row)
    return rows if rows and rows[0]["method"] == REFERENCE else []


def _rate(point: Point) -> float:
    return float(point.setting.values["optimizer.lr"])


def _of_draws(points: Sequence[Point], name: str, drawn: Array) -> Array:
    """[draws] of each draw's setting its ``new_draws`` or ``old_draws``."""
    return np.stack([getattr(point, name) for point in points], axis=1)[np.arange(len(drawn)), drawn]


def _row(setting: str, comparison: Comparison, number: int) -> dict[str, object]:
    run: Run = comparison.runs[number]
    steps = run.steps
    row: dict[str, object] = {
        "setting": setting,
        "method": run.method,
        "optimizer.lr": run.learning_rate,
        "seed": run.seed,
        "first_lr": f"{steps[0]['lr']:.4g}" if steps else "",
        "mean_lr": f"{np.mean([line['lr'] for line in steps]):.4g}" if steps else "",
        "last_lr": f"{steps[-1]['lr']:.4g}" if steps else "",
    }
    for name in (NEW, *OLD):
        outcome = comparison.outcomes[number].get(name)
        row[name] = "" if outcome is None else f"{outcome.score.value:.5f}"
    results = run.results.get("losses")
    for name in OTHERS:
        row[name] = "" if results is None else f"{results.tasks[name].score:.5f}"
    return row


def _numbers(name: str, one: Estimate | None) -> dict[str, str]:
    values = (None, None, None) if one is None else (one.value, one.low, one.high)
    keys = (name, f"{name}_low", f"{name}_high")
    return {key: "" if value is None else f"{value:.4f}" for key, value in zip(keys, values, strict=True)}


def _flat(one: Compared) -> dict[str, object]:
    pair = one.pair
    without = [reading.ratio for reading in pair.without_one if reading.ratio is not None]
    ends = {
        "ratio_at_lowest": pair.lowest.ratio,
        "ratio_at_highest": pair.highest.ratio,
        "ratio_without_a_rate_low": min(without, key=lambda each: each.value, default=None),
        "ratio_without_a_rate_high": max(without, key=lambda each: each.value, default=None),
    }
    return {
        "setting": one.setting,
        "new": one.new,
        "measure": one.measure,
        "one": one.one,
        "other": one.other,
        "runs_of_one": one.num_runs[0],
        "runs_of_other": one.num_runs[1],
        "lowest_score": f"{one.scores[0]:.2f}",
        "highest_score": f"{one.scores[1]:.2f}",
        **_numbers("difference", pair.mean.difference),
        **_numbers("ratio", pair.mean.ratio),
        **{key: "" if value is None else f"{value.value:.4f}" for key, value in ends.items()},
        **_numbers("five_difference", one.protocol.mean.difference),
        **_numbers("five_ratio", one.protocol.mean.ratio),
    }


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of run.py")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    analyse(arguments.study, arguments.out)
