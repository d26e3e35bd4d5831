"""The table that an evaluation ends with: each task's score before and after tuning, and how sure the change is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from finch.evaluation.results import SuiteResult, TaskResult, read_samples
from finch.evaluation.statistics import mean_interval, paired_delta


def format_table(
    base: tuple[Path, SuiteResult], tuned: Sequence[tuple[str, Path, SuiteResult]], tasks: Sequence[str]
) -> str:
    """One suite's table, scores in percent, deltas in points.

    Args:
        base: the folder of the pretrained model's results, and the results.
        tuned: the same of the tuned models, after their names.
        tasks: the rows.

    Returns:
        Lines of text: the table, and the definition of each task.
    """
    header = ["task", "metric", "model", "score", "delta", "95% interval", "n", "chance"]
    rows = []
    for name in tasks:
        before = base[1].tasks[name]
        rows.append(
            [
                name,
                _metric(before),
                "base",
                _percent(before),
                "",
                _own_interval(base[0], before),
                str(before.n),
                _chance(before),
            ]
        )
        for label, folder, result in tuned:
            after = result.tasks[name]
            rows.append(["", "", label, _percent(after), *_change(base[0], before, folder, after)])
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    notes = [f"{name}: {base[1].tasks[name].definition}" for name in tasks]
    return "\n".join([*lines, "", *notes])


def _change(base_folder: Path, before: TaskResult, folder: Path, after: TaskResult) -> list[str]:
    """Delta, its interval, n, and chance, which stands in the base's row."""
    if before.score is None or after.score is None:
        return ["", "", str(after.n), ""]
    delta = paired_delta(read_samples(base_folder, before), read_samples(folder, after))
    margin = "" if math.isnan(delta.low) else f"±{50 * (delta.high - delta.low):.1f}"
    return [f"{100 * delta.delta:+.1f}", margin, str(delta.n), ""]


def _metric(task: TaskResult) -> str:
    return task.metric if task.is_higher_better else f"{task.metric}, lower is better"


def _percent(task: TaskResult) -> str:
    return "-" if task.score is None else f"{100 * task.score:.1f}"


def _own_interval(folder: Path, task: TaskResult) -> str:
    """Of the score itself."""
    if task.score is None:
        return ""
    mean = mean_interval(read_samples(folder, task))
    return "" if math.isnan(mean.low) else f"±{50 * (mean.high - mean.low):.1f}"


def _chance(task: TaskResult) -> str:
    return "-" if task.chance is None else f"{100 * task.chance:.1f}"
