"""Reads the sweeps' evaluations and writes what the study reports: results.csv, comparisons.csv, comparisons.md and the figure of the fronts.

python -m studies.smollm2_tofu.analyse out/study --out studies/smollm2_tofu/results

The protocol, and what each number means: README.md. Points, their bootstrap and fronts are those of `finch report`.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finch.report.front import Point, TradeOff, front_draws, group_settings, interpolate, points_by_method, trade_off
from finch.report.measures import Comparison, compare
from finch.report.runs import Run, read_runs, sort_runs
from finch.report.selection import Measure
from finch.sweep.grid import FINISHED
from studies.smollm2_tofu.figure import draw

SETTINGS = ("smooth", "blocks", "wrong", "quick")
PROBED = ("precision", "blocks_stories260k")
"""Sweeps of stories260k, whose probes at the last step are all that is measured."""
NEW = "tofu"
EXPLORATORY = "train"
"""Not in the protocol: the loss of the learned answers in place of the six-way accuracy, which is noisy and has a ceiling."""
PRIMARY = "own_answers_kl"
OLD = (PRIMARY, "own_answers", "stories", "hellaswag", "winogrande")
OTHERS = ("train", "paraphrases", "held_out")
NUM_SCORES = 5
FLOOR = 1e-6
"""Of a draw's forgetting in a quotient, in nats."""
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
    ("kl", "sft"),
    ("kl", "finch"),
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A number and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Array) -> Interval:
        return cls(value, *(float(one) for one in np.quantile(draws, (0.025, 0.975))))

    def text(self, places: int) -> str:
        return f"{self.value:.{places}f} [{self.low:.{places}f}, {self.high:.{places}f}]"


@dataclass(frozen=True)
class Pair:
    """Two methods' forgetting at equal new-task score.

    Attributes:
        new: the task of the score.
        lowest, highest: of the scores, in percent or nats.
        difference: mean over the scores of the one's forgetting minus the other's, in nats or points.
        ratio: exp of the mean log of the quotient of both; None where one is not above 0 at each score.
        num_runs: of both methods.
    """

    setting: str
    new: str
    measure: str
    one: str
    other: str
    lowest: float
    highest: float
    difference: Interval
    ratio: Interval | None
    num_runs: tuple[int, int]


def analyse(study: Path, out: Path) -> None:
    """
    Args:
        study: the folder of the sweeps; a setting without any is left out.
        out: for the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    pairs: list[Pair] = []
    rows: list[dict[str, object]] = []
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
            if name == PRIMARY:
                by_loss = _trade_off(compare(comparison.runs, new_task=EXPLORATORY), measure)
                pairs += [pair for names in PAIRS if (pair := _compare(setting, EXPLORATORY, measure, by_loss, names))]
                fronts[setting] = points, by_loss
    _write_csv(out / "results.csv", rows)
    _write_csv(out / "comparisons.csv", [_flat(pair) for pair in pairs])
    (out / "comparisons.md").write_text(_table(pairs), encoding="utf-8")
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


def _compare(setting: str, new: str, measure: Measure, points: TradeOff, names: tuple[str, str]) -> Pair | None:
    one, other = names
    methods = points_by_method(points)
    if one not in methods or other not in methods or points.base is None:
        return None
    both = (methods[one], methods[other])
    lowest = max(min(point.new.value for point in group) for group in both)
    highest = min(max(point.new.value for point in group) for group in both)
    if lowest >= highest:
        return None
    scores = np.linspace(lowest, highest, NUM_SCORES)
    (value, draws), (other_value, other_draws) = (_forgetting(group, points.base, scores) for group in both)
    difference = Interval.of(float((value - other_value).mean()), (draws - other_draws).mean(axis=1))
    ratio = None
    # Of other measures a rise near 0 makes quotients meaningless; a score that the pretrained model has costs nothing.
    if measure.name == PRIMARY and min(value.min(), other_value.min()) > 0:
        log = np.log(draws.clip(FLOOR)) - np.log(other_draws.clip(FLOOR))
        quotient = math.exp(float((np.log(value) - np.log(other_value)).mean()))
        ratio = Interval.of(quotient, np.exp(log.mean(axis=1)))
    counts = [sum(len(point.runs) for point in group) for group in both]  # runs that have both scores
    ends = sorted((abs(lowest), abs(highest)))  # a loss has the sign of a score here
    return Pair(setting, new, measure.name, one, other, ends[0], ends[1], difference, ratio, (counts[0], counts[1]))


def _forgetting(group: Sequence[Point], base: Point, scores: Array) -> tuple[Array, Array]:
    """[scores] and [draws, scores]: a method's forgetting at each score, on the front through its settings and the pretrained model."""
    every = [base, *group]
    new, old = [point.new.value for point in every], [point.old.value for point in every]
    value = interpolate(new, old, scores)
    return -value, -front_draws(group, base, scores)


def _row(setting: str, comparison: Comparison, number: int) -> dict[str, object]:
    run: Run = comparison.runs[number]
    steps = run.steps
    row: dict[str, object] = {
        "setting": setting,
        "method": run.method,
        "optimizer.lr": run.learning_rate,
        "seed": run.seed,
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


def _flat(pair: Pair) -> dict[str, object]:
    ratio = pair.ratio
    return {
        "setting": pair.setting,
        "new": pair.new,
        "measure": pair.measure,
        "one": pair.one,
        "other": pair.other,
        "runs_of_one": pair.num_runs[0],
        "runs_of_other": pair.num_runs[1],
        "lowest_score": f"{pair.lowest:.2f}",
        "highest_score": f"{pair.highest:.2f}",
        "difference": f"{pair.difference.value:.4f}",
        "difference_low": f"{pair.difference.low:.4f}",
        "difference_high": f"{pair.difference.high:.4f}",
        "ratio": "" if ratio is None else f"{ratio.value:.4f}",
        "ratio_low": "" if ratio is None else f"{ratio.low:.4f}",
        "ratio_high": "" if ratio is None else f"{ratio.high:.4f}",
    }


def _table(pairs: Sequence[Pair]) -> str:
    """The protocol's pairs: the primary measure, and the differences of all others; then the exploratory ones."""
    lines = [
        "| setting | pair | scores, % | KL, ratio | KL, nats | own answers, nats | stories, nats | HellaSwag, points | WinoGrande, points |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        if (pair.new, pair.measure) != (NEW, PRIMARY):
            continue
        same = {
            other.measure: other
            for other in pairs
            if other.new == NEW and (other.setting, other.one, other.other) == (pair.setting, pair.one, pair.other)
        }
        ratio = "" if pair.ratio is None else pair.ratio.text(2)
        cells = [
            same[name].difference.text(1 if name in ("hellaswag", "winogrande") else 3) if name in same else ""
            for name in OLD
        ]
        scores = f"{pair.lowest:.1f} to {pair.highest:.1f}"
        lines.append(f"| {pair.setting} | {pair.one} / {pair.other} | {scores} | {ratio} | " + " | ".join(cells) + " |")
    lines += ["", "| setting | pair | loss of the learned answers, nats | runs | KL, ratio |", "|---|---|---|---|---|"]
    for pair in pairs:
        if pair.new == EXPLORATORY and pair.ratio is not None:
            scores, runs = f"{pair.lowest:.2f} to {pair.highest:.2f}", f"{pair.num_runs[0]}, {pair.num_runs[1]}"
            lines.append(f"| {pair.setting} | {pair.one} / {pair.other} | {scores} | {runs} | {pair.ratio.text(2)} |")
    return "\n".join(lines) + "\n"


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
