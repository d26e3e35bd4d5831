"""Where the numbers come from: definitions, data, limits, versions, and the commands that make them again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from finch import run_files
from finch.report.measures import PROBE, Comparison
from finch.report.runs import METHOD
from finch.report.settings import RESAMPLES

DEFINITIONS = (
    "Change: tuned minus pretrained, paired by document. Its standard error is sd(differences) / sqrt(n); its 95% interval a bootstrap of 10,000 "
    "resamples; p by the exact McNemar test where scores are 0 or 1, else by sign flips. Documents of one cluster, such as two orders of a question, count "
    "as one.",
    "Mean of the old tasks: unweighted, in points; for a run SE = sqrt(sum of SE^2) / number of tasks.",
    f"Intervals of settings and of the front: {RESAMPLES:,} draws of documents of each task and of seeds, the same ones for all runs, so that differences are "
    "paired; percentiles. Seeds' weights are stretched by sqrt(k / (k - 1)), since a bootstrap of k seeds has too little variance; of two or three seeds such an "
    "interval is still a rough one.",
    "The front of a method: its settings that no other of its settings beats on both axes, and the pretrained model, joined by straight lines. A draw whose "
    "front ends below a score has its last value there.",
    "Holm's correction is over the tasks of one run, not over runs.",
)


def settings_lines(comparison: Comparison) -> list[str]:
    """A line for each suite: what was evaluated, with which settings and versions."""
    lines = []
    for suite in sorted({suite for run in comparison.runs for suite in run.results}):
        result = next(run.results[suite] for run in comparison.runs if suite in run.results)
        settings = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
        base = comparison.bases.get(suite)
        weights = "" if base is None else f"; pretrained weights {base.weights[:12]} ({base.model})"
        lines.append(f"{suite}: {settings}; {versions}{weights}")
    return lines


def definition_lines(comparison: Comparison) -> list[str]:
    return [
        f"{measure.name} ({measure.role}, {measure.metric}): {measure.definition}" for measure in comparison.measures
    ]


def data_lines(comparison: Comparison) -> list[str]:
    """What the runs were trained on, each data set once."""
    lines: dict[str, None] = {}
    for run in comparison.runs:
        dataset = run.config.get("dataset")
        if isinstance(dataset, dict):
            shown = {
                key: value
                for key, value in dataset.items()
                if key not in ("_component_", "column_map") and value is not None
            }
            lines[", ".join(f"{key}={value}" for key, value in shown.items()) or str(dataset.get("_component_"))] = None
    return list(lines)


def commands(comparison: Comparison, folders: Sequence[Path], out: Path, new_task: str | None) -> list[str]:
    """Of one run's training and evaluation, and of this report."""
    lines = []
    run = next((one for one in comparison.runs if one.config), None)
    if run is not None:
        recipe = "finch_lora_finetune" if "lora" in str(run.values[METHOD]).split("+") else "finch_full_finetune"
        lines.append(f"tune run {recipe} --config {shlex.quote(str(run.folder / run_files.CONFIG))}")
    evaluated = next((one for one in comparison.runs if one.results), None)
    if evaluated is not None and comparison.bases:
        suites = ",".join(sorted(evaluated.results))
        base = next(iter(comparison.bases.values())).model
        limit = next(iter(evaluated.results.values())).settings.get("limit")
        lines.append(
            f"finch evaluate --base {shlex.quote(base)} --tuned {shlex.quote(str(evaluated.folder))} --suite {suites}"
            + (f" --limit {limit}" if limit is not None else "")
        )
    named = [] if new_task is None else ["--new-task", new_task]
    lines.append(shlex.join(["finch", "report", *map(os.fspath, folders), "--out", os.fspath(out), *named]))
    return lines


def probe_line(comparison: Comparison) -> list[str]:
    steps = sorted({one.step for outcomes in comparison.outcomes for one in outcomes.values() if one.step is not None})
    if not any(measure.source == PROBE for measure in comparison.measures) or not steps:
        return []
    return [
        f"Probes: evaluated while training; numbers of step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}."
    ]
