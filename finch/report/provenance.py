"""Where the numbers come from: definitions, data, limits, versions, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from finch import run_files
from finch.evaluation.tasks.registry import SUITES
from finch.report.measures import Comparison
from finch.report.runs import METHOD
from finch.report.settings import RESAMPLES

DEFINITIONS = (
    "Change: tuned minus pretrained, paired by document. Its standard error is sd(differences) / sqrt(n); its 95% interval a bootstrap of 10,000 "
    "resamples; p by the exact McNemar test where scores are 0 or 1, else by sign flips. Documents of one cluster, such as two orders of a question, count "
    "as one.",
    "Mean of the old tasks: unweighted, of tasks of one unit; for a run SE = sqrt(sum of SE^2) / number of tasks.",
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


def divergence_line(comparison: Comparison) -> tuple[str, ...]:
    names = [measure.name for measure in comparison.measures if measure.metric == "kl"]
    if not names:
        return ()
    return (
        f"{', '.join(names)}: a divergence from the pretrained model, 0 before tuning and never below it: its change is its value, and its p says no "
        "more than that the model has changed.",
    )


def commands(comparison: Comparison, options: Sequence[str]) -> list[str]:
    """Of one run's training and evaluation, and of this report.

    Args:
        options: of the report's own command line.
    """
    lines = []
    run = next((one for one in comparison.runs if one.config), None)
    if run is not None:
        recipe = "finch_lora_finetune" if "lora" in str(run.values[METHOD]).split("+") else "finch_full_finetune"
        lines.append(f"tune run {recipe} --config {shlex.quote(str(run.folder / run_files.CONFIG))}")
    evaluated = next((one for one in comparison.runs if not SUITES.keys().isdisjoint(one.results)), None)
    suites = sorted(SUITES.keys() & evaluated.results.keys()) if evaluated is not None else []
    base = next((comparison.bases[suite].model for suite in suites if suite in comparison.bases), None)
    if evaluated is not None and base is not None:
        limit = evaluated.results[suites[0]].settings.get("limit")
        lines.append(
            f"finch evaluate --base {shlex.quote(base)} --tuned {shlex.quote(str(evaluated.folder))} --suite {','.join(suites)}"
            + (f" --limit {limit}" if limit is not None else "")
        )
    lines.append(shlex.join(["finch", "report", *options]))
    return lines


def probe_line(comparison: Comparison) -> list[str]:
    steps = sorted({one.step for outcomes in comparison.outcomes for one in outcomes.values() if one.step is not None})
    if not any(measure.is_probe for measure in comparison.measures) or not steps:
        return []
    return [
        f"Probes: evaluated while training; numbers of step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}."
    ]
