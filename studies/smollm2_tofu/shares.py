"""What each setting of self_replay forgets, as a share of what cosine SFT forgets that has learned as much.

python -m studies.smollm2_tofu.shares out/study --out studies/smollm2_tofu/results

writes shares.csv and prints README.md's table, a line per sweep, method, strength and rate. *At equal training loss*: on straight lines between
cosine SFT's rates, means over seeds; of the KL its logarithm. Then the protocol's own reading, fronts.csv: of settings with several rates the ratio
of the KL on fronts, at 101 equal scores. Intervals are check.py's: a bootstrap over rows and seeds, paired between runs.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from studies.smollm2_tofu.check import PRIMARY, Array, Points, common, compare, read_points, with_interval

TASKS = {  # the sweep of a task's cosine SFT: others on the same task, the answers that are not trained
    "smooth": (("replay", "breadth"), "paraphrases"),
    "equations": ((), "held_out"),
}
MEASURES = {  # column: measure, whether it is a share of SFT's in place of a difference from it, its form in the table
    "kl_share": (PRIMARY, True, "{:.2f}"),
    "stories_share": ("stories", True, "{:.2f}"),
    "other_answers_above": (None, False, "{:+.2f}"),
    "points_below": ("tofu", False, "{:+.1f}"),
}
ENDS = ("", "_low", "_high")
FRONTS = "setting", "other", "new", "lowest_score", "highest_score", "ratio", "ratio_low", "ratio_high"
HEAD = "setting, strength | rate | runs | training loss | KL | stories' rise | paraphrase loss above | points of accuracy below"


def shares(study: Path) -> list[dict[str, str]]:
    """The table's lines; first those of the controls without replay, at the rates of the others. A positive difference speaks against the
    setting: nats per token of the loss of answers that are not trained, points of six-way accuracy."""
    lines: dict[tuple[str, float], dict[str, str]] = {}
    tasks = {sweep: how for sweep, how in TASKS.items() if any((study / sweep).glob("*/cell.json"))}
    cells = itertools.product(tasks.items(), MEASURES.items())
    for (sweep, (others, answers)), (column, (measure, is_share, _)) in cells:
        _, methods = read_points(study / sweep, "train", measure or answers, *(study / other for other in others))
        sft = methods.pop("sft")
        shown = {name: points for name, points in methods.items() if not others or ": " in name}
        rates = {rate for points in shown.values() for rate in points.rates}
        shown = {name: methods[name] for name in ("constant", "finch") if name in methods} | shown
        numbered = [(name, i) for name, points in shown.items() for i, at in enumerate(points.rates) if at in rates]
        for name, number in numbered:
            points, setting = shown[name], name if ": " in name else f"{sweep}: {name}"
            score, forgotten, rate = points.new[:, number], points.forgotten[:, number], points.rates[number]
            its = at_equal_loss(sft, score, is_log=measure == PRIMARY)
            # Of what SFT has not forgotten for sure there is no share.
            has_one = not is_share or np.quantile(its, 0.025) > 0
            values = with_interval(forgotten / its if is_share else forgotten - its) if has_one else (np.nan,) * 3
            line = {"setting": setting, "optimizer.lr": f"{rate:g}", "runs": str(points.num_runs[number])}
            line |= {"training_loss": f"{-score[0]:.3f}", "kl": f"{forgotten[0]:.4f}"}  # the KL comes first
            line = lines.setdefault((setting, rate), line)
            line |= {f"{column}{end}": f"{value:.4f}" for end, value in zip(ENDS, values, strict=True)}
    return list(lines.values())


def table(lines: Sequence[Mapping[str, str]]) -> str:
    """The table of README.md."""
    rows = [f"| {HEAD} |", "|---" * (HEAD.count("|") + 1) + "|"]
    for line in lines:
        name, keys = line["setting"], ("optimizer.lr", "runs", "training_loss")
        cells = [name if name.startswith("equations") else name.partition(": ")[2], *(line[key] for key in keys)]
        for column, (*_, form) in MEASURES.items():
            numbers = [float(line[column + end]) for end in ENDS]
            cells.append("" if np.isnan(numbers[0]) else f"{form} [{form}, {form}]".format(*numbers))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def at_equal_loss(points: Points, score: Array, *, is_log: bool) -> Array:
    """[1 + draws] what a method has forgotten at ``score``, minus the training loss, in each draw; beyond its rates that of the last one."""
    order = points.new.argsort(axis=1)
    known = np.log(points.forgotten) if is_log else points.forgotten
    x, y = (np.take_along_axis(table, order, axis=1) for table in (points.new, known))
    found = np.array([np.interp(*each) for each in zip(score, x, y, strict=True)])
    return np.exp(found) if is_log else found


def fronts(study: Path) -> list[dict[str, str]]:
    """The ratios on fronts, of TOFU: to cosine SFT, of averages also to those of SFT; none where no score is on both fronts."""
    lines = []
    for new in ("train", "tofu", "paraphrases"):
        base, methods = read_points(study / "smooth", new, PRIMARY, study / "replay", study / "breadth")
        several = [name for name, points in methods.items() if ": " in name and len(points.rates) > 1]
        pairs = [
            (name, other) for name in several for other in ("sft", "wise_ft") if "average" in name or other == "sft"
        ]
        for one, other in pairs:
            both = methods[one], methods[other]
            low, high = common(base, *both)
            if low <= high:
                values = low, high, *with_interval(np.exp(compare(base, *both, 101)["ratio"]))
                lines.append(dict(zip(FRONTS, [one, other, new, *(f"{value:.4f}" for value in values)], strict=True)))
    return lines


def write(file: Path, lines: Sequence[Mapping[str, str]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = shares(arguments.study)
    write(arguments.out / "shares.csv", found)
    write(arguments.out / "fronts.csv", fronts(arguments.study))
    print(table(found), end="")
