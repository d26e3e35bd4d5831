"""What the report says in words: its summary, the notes before its numbers, and where these come from.

Methods are compared at equal new-task scores only, never at their own best settings. A difference is called one where the 95% interval and the range
without any one setting leave out none.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from finch.base import hub, run_files
from finch.evaluation.custom_tasks import CUSTOM
from finch.evaluation.results import SuiteResult
from finch.evaluation.statistics import FEW_DOCUMENTS
from finch.evaluation.tasks.registry import SUITES
from finch.study.report.content import Names, Report
from finch.study.report.front import NUM_READINGS, RESAMPLES, Front, Point, Reading, choose_by
from finch.study.report.measures import Comparison
from finch.study.report.runs import Run, base_builder
from finch.study.report.selection import Measure
from finch.study.report.tables import equal_score, estimate, number
from finch.study.sweep.grid import EVALUATED, FINISHED, SMALL_LR

Paragraph = tuple[str, Sequence[str]]
"""Its text, and the items below it."""

DEFINITIONS = (
    "Change: tuned minus pretrained, document by document. The standard error (SE) is sd(differences) / sqrt(n), the 95% interval a bootstrap of 10,000 "
    "resamples. p is from the exact McNemar test where scores are 0 or 1, else from sign flips. Documents that belong together, such as two orders of a "
    "question, count as one. Holm's correction is over the tasks of one run, not over runs.",
    "Mean of the old tasks: unweighted, of tasks of one unit; for a run SE = sqrt(sum of SE^2) / number of tasks.",
    f"Intervals of settings and of fronts: the documents of each task, and the seeds, are drawn anew {RESAMPLES:,} times, the same ones for all runs; the interval "
    "holds the middle 95% of the results. Few seeds vary too little when they are drawn anew: the weights of k seeds are stretched by sqrt(k / (k - 1)). With "
    "two or three seeds an interval is still a rough one.",
    "The front of a method: its settings that none of its others beats both on the new task and on the old ones, and the pretrained model, joined by straight "
    f"lines. Two methods' fronts are read at {NUM_READINGS} scores, from the lowest that both have settings around to the highest that both reach. A ratio is of the "
    "one's forgetting to the other's, below 1 where the one forgets less, on average a geometric mean; where one of both forgets nothing there is a difference only. A "
    "score beyond the front of a draw is left out of that draw. The range without any one setting shows what straight lines between settings are worth: a difference is "
    "called one only if it also holds there.",
)


def summarize(report: Report) -> list[Paragraph]:
    """What each method has learned and forgotten, and how it compares with the reference at an equal new-task score."""
    comparison, trade_off, front, names = report.comparison, report.trade_off, report.front, report.names
    num_seeds = len({run.seed for run in comparison.runs if run.seed is not None})
    seeds = f", {num_seeds} seeds" if num_seeds > 1 else ", one seed" if num_seeds else ""
    runs = f"{len(comparison.runs)} runs" if len(comparison.runs) > 1 else "One run"
    opening = f"{runs} of {join(names.labels)}{seeds}."
    if not trade_off.points:
        return [(f"{opening} {_what_is_missing(comparison)}", [])]
    new, old = report.new, comparison.old
    if trade_off.base is not None:
        score = number(new.sign * trade_off.base.new.value, new.places)
        opening += f" Before tuning the model has {score}{_unit(new)} on {new.name} ({new.metric})."
    forgotten = f"the mean change of {len(old)} old tasks" if len(old) > 1 else f"the change of {old[0].name}"
    if len(front.methods) < 2:
        scores, chosen_by = choose_by(comparison, trade_off)
        best = max(trade_off.points, key=lambda point: scores[point.setting])
        return [(f"{opening} Its setting with the best {chosen_by}, and {forgotten}:", [_learned(best, report)])]
    text = f"{forgotten[0].upper()}{forgotten[1:]}, of each method and {names.styles[front.reference].label} where both have learned equally much"
    text += " (95% intervals, each for one comparison):" if trade_off.has_intervals else ":"
    items = [_pair_text(names, front, one, new, old[0]) for one in front.pairs]
    return [(f"{opening} {_conclusion(front, new, names)}", []), (text, items)]


def join(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else ", ".join(words[:-1]) + " and " + words[-1]


def _unit(measure: Measure) -> str:
    return measure.score_unit if measure.score_unit == "%" else f" {measure.score_unit}"


def _what_is_missing(comparison: Comparison) -> str:
    if comparison.new is None and not comparison.old:
        return "Neither an evaluation nor a probe measures what was learned or forgotten yet: this report has training curves only."
    if comparison.new is None:
        return "Nothing measures the new task yet (an evaluation of it, a probe with task: True, or validation rows that all runs share), so there is no trade-off."
    if not comparison.old:
        return "Nothing measures old tasks yet (the suite forgetting, or probes), so there is no trade-off."
    return "No run has both the new task and all old tasks yet, so there is no trade-off."


def _learned(point: Point, report: Report) -> str:
    new, old, names = report.new, report.old, [one.name for one in report.comparison.old]
    learned = estimate(point.new.times(new.sign), new.places, unit=_unit(new))
    change = estimate(point.old.times(old.sign), old.places, sign=True, unit=f" {old.change_unit}")
    of = "old tasks" if len(names) > 1 else names[0]
    text = f"{report.names.of(point.setting)}: {learned} on {new.name}; {of} {change}"
    is_unclear = point.old.ends and point.old.ends[0] <= 0 <= point.old.ends[1]
    return f"{text}, not distinguishable from 0" if is_unclear else text


def _conclusion(front: Front, new: Measure, names: Names) -> str:
    """One sentence, of the means over the common ranges."""
    labels: dict[str, list[str]] = {}
    for method, pair in front.pairs.items():
        verdict = "apart" if pair.is_guess else {-1: "less", 1: "more", 0: "alike", None: "unknown"}[pair.verdict]
        if verdict in ("less", "more") and len(pair.scores) == 1:
            verdict = "once"
        labels.setdefault(verdict, []).append(names.styles[method].label)
    reference = names.styles[front.reference].label
    texts: dict[str, Callable[[str, str], str]] = {
        "less": lambda those, forget: f"{those} {forget} less than {reference}",
        "more": lambda those, forget: f"{those} {forget} more than {reference}",
        "alike": lambda those, _: f"of {those} no difference from {reference} can be shown",
        "unknown": lambda those, _: (
            f"of {those} nothing is concluded, since there are no intervals: probes have them from five seeds on"
        ),
        "once": lambda those, _: f"of {those} nothing is concluded from one score, add learning rates",
        "apart": lambda those, _: (
            f"{reference} has no common score with {those}: differences marked † are extrapolated"
        ),
    }
    parts = [
        text(join(labels[verdict]), "forget" if len(labels[verdict]) > 1 else "forgets")
        for verdict, text in texts.items()
        if verdict in labels
    ]
    return f"At an equal score on {new.name}: {'; '.join(parts)}."


def _pair_text(names: Names, front: Front, method: str, new: Measure, old: Measure) -> str:
    """The mean over the common range, and the highest score that both reach."""
    pair, label, reference = front.pairs[method], *(names.styles[one].label for one in (method, front.reference))
    if pair.is_guess:
        further = max((front.reference, method), key=lambda one: front.highest[one])
        return f"{label} and {reference}: at no common score; train {names.styles[further].label} with fewer epochs or a lower rate too."

    def text(one: Reading) -> str:
        if one.ratio is not None:
            return f"{estimate(one.ratio, 2)} times as much"
        more = one.difference.value > 0
        shown = estimate(one.difference if more else one.difference.times(-1), old.places, unit=f" {old.change_unit}")
        return f"{shown} {'more' if more else 'less'}"

    end = equal_score(pair.scores[-1], new)
    reached = (
        f" (in {pair.highest.share:.0%} of the draws)"
        if pair.highest.difference.ends and pair.highest.share < 1
        else ""
    )
    at_end = f"at {end}, the highest score that both reach{reached}, {text(pair.highest)}"
    if len(pair.scores) == 1:
        return f"{label} forgets {at_end}."
    without = pair.ratios_without_one
    rates = f", {without[0]:.2f} to {without[1]:.2f} without any one setting" if without and pair.mean.ratio else ""
    return f"{label} forgets {text(pair.mean)}, from {equal_score(pair.scores[0], new)} to {end} on average{rates}; {at_end}."


def _old_tasks_note(comparison: Comparison) -> Iterator[str]:
    def by_unit(measures: Sequence[Measure]) -> str:
        names: dict[str, list[str]] = {}
        for measure in measures:
            names.setdefault(measure.unit, []).append(measure.name)
        return ", ".join(f"{join(those)} in {unit}" for unit, those in names.items())

    old, others = comparison.old, comparison.other_old
    has_no_common_unit = {one.unit for one in old}.isdisjoint(one.unit for one in others if not one.is_at_chance)
    if old and others:
        yield (
            f"The trade-off's old {'tasks are' if len(old) > 1 else 'task is'} {by_unit(old)}. Only in the tables of changes: {by_unit(others)}"
            + (", since a mean of points and nats says nothing" if has_no_common_unit else "")
            + ". The option --old-tasks chooses others."
        )


def _unfinished_note(comparison: Comparison) -> Iterator[str]:
    going = [run for run in comparison.runs if run.metrics and run.status not in (FINISHED, EVALUATED)]
    number_left = sum(run.finished_epochs < (run.config.get("epochs") or 0) for run in going)
    if number_left:
        yield f"{number_left} of {len(comparison.runs)} runs have not ended their last epoch; their numbers are the current ones."


def _other_models_note(comparison: Comparison) -> Iterator[str]:
    names = []
    for run in comparison.runs:
        model = run_files.chosen_model(run.folder)
        measured = {Path(result.model).name for result in run.results.values()}
        if model is not None and measured - {model.resolve().name}:
            names.append(run.folder.name)
    if names:
        yield f"{join(names)}: evaluated was a model that the run has replaced since; evaluate again."


def _small_lr_note(comparison: Comparison) -> Iterator[str]:
    is_there = any(run.method == SMALL_LR for run in comparison.runs)
    if is_there and any(not measure.is_probe for measure in comparison.old):
        yield (
            "small_lr's learning rate was chosen on half of the old tasks' documents, which are among those reported here; what it forgets on the "
            "other half is in the table of SFT's rates."
        )


def _chance_notes(comparison: Comparison) -> Iterator[str]:
    for measure in (*comparison.old, *comparison.other_old):
        if measure.is_at_chance:
            place = "" if measure in comparison.old else ", and it is not in the mean"
            chance = number(measure.scale * (measure.chance or 0), measure.places)
            yield f"{measure.name}: the pretrained model is not above chance ({chance}%), so it can forget nothing there{place}."


def _few_documents_note(comparison: Comparison) -> Iterator[str]:
    few = {
        name: one.n
        for outcomes in comparison.outcomes
        for name, one in outcomes.items()
        if one.n and one.n < FEW_DOCUMENTS
    }
    if few:
        counts = join([f"{name} ({n})" for name, n in few.items()])
        yield f"Caution: fewer than {FEW_DOCUMENTS} documents, so rough intervals: {counts}."


def _probes_note(comparison: Comparison) -> Iterator[str]:
    probes = [measure.name for measure in (comparison.new, *comparison.old) if measure is not None and measure.is_probe]
    if probes:
        yield (
            f"{join(probes)}: probes take the place of evaluations: small sets of rows that the runs measured while they trained. They have no intervals over "
            "documents. Their numbers are those at the best epoch, else the last."
        )


def _not_evaluated_note(comparison: Comparison) -> Iterator[str]:
    names = [run.folder.name for run in comparison.runs if run.metrics and not run.results]
    if 0 < len(names) < len(comparison.runs):
        yield f"Without an evaluation: {join(names)}."


def _cap_note(comparison: Comparison) -> Iterator[str]:
    shares = list(filter(None, (run_files.capped_share(run.metrics) for run in comparison.runs)))
    if shares:
        runs = f"{len(shares)} of {len(comparison.runs)} runs, in up to {max(shares):.0%} of their steps (the table of runs)"
        yield f"FINCH was at its cap, lr_scheduler.eta_max, in {runs}: there it is a constant rate."


def _precisions_note(comparison: Comparison) -> Iterator[str]:
    precisions = sorted({str(run.config["dtype"]) for run in comparison.runs if run.config.get("dtype")})
    if len(precisions) > 1:
        yield (
            f"The runs were trained in different precisions ({join(precisions)}): rounding in bf16 acts like a smaller learning rate, so compare them at equal "
            "new-task scores, not at equal rates."
        )


def _evaluations_notes(comparison: Comparison) -> Iterator[str]:
    results = [result for run in comparison.runs for result in run.results.values()]
    versions: dict[str, set[str]] = {}
    for package, version in (item for result in results for item in result.versions.items()):
        versions.setdefault(package, set()).add(version)
    mixed = [f"{package} {join(sorted(those))}" for package, those in versions.items() if len(those) > 1]
    if mixed:
        yield f"The evaluations were made with different versions: {'; '.join(mixed)}."
    limits = {result.settings.get("limit") for result in results} - {None}
    if limits:
        yield f"Evaluations are limited to {join(sorted(map(str, limits)))} documents per task: numbers of full tasks differ."


_NOTES = (
    _old_tasks_note,
    _unfinished_note,
    _other_models_note,
    _small_lr_note,
    _chance_notes,
    _few_documents_note,
    _probes_note,
    _not_evaluated_note,
    _cap_note,
    _precisions_note,
    _evaluations_notes,
)


def notes(comparison: Comparison) -> list[str]:
    """What a reader has to know before comparing numbers."""
    return [note for notes_of in _NOTES for note in notes_of(comparison)]


def left_out(report: Report) -> list[str]:
    """Runs without steps, and runs that have no place in the trade-off, by what they lack."""
    comparison, runs = report.comparison, report.comparison.runs
    waiting = sum(not run.metrics and not run.results for run in runs)
    found = [f"{waiting} of {len(runs)} runs {'have' if waiting > 1 else 'has'} no steps yet."] if waiting else []
    if comparison.new is None or not comparison.old:
        return found
    absent: dict[tuple[str, ...], Counter[str]] = {}
    for setting in report.settings:
        for run in setting.runs:
            missing = tuple(measure.name for measure in comparison.missing_measures(run))
            absent.setdefault(missing, Counter())[report.names.of(setting)] += 1
    absent.pop((), None)
    for missing, counts in absent.items():
        those = "; ".join(name + (f" ({count} seeds)" if count > 1 else "") for name, count in counts.items())
        lack, are = ("lack", "are") if counts.total() > 1 else ("lacks", "is")
        found.append(
            f"{counts.total()} of {len(runs)} runs {lack} {join(missing)} and {are} absent from the trade-off: {those}."
        )
    return found


def facts(comparison: Comparison, today: date) -> list[tuple[str, str]]:
    """Model, task, training rows and steps of the runs, and the report's date: (name, value)."""
    configs = [run.config for run in comparison.runs if run.config]
    models = dict.fromkeys(filter(None, map(_model, configs)))
    rows = dict.fromkeys(filter(None, map(_training_rows, comparison.runs)))
    steps = sorted({run.steps[-1]["step"] for run in comparison.runs if run.steps})
    new = comparison.new
    found = {
        "Model": join(list(models)),
        "Task": "" if new is None else new.name if new.is_probe else f"{new.name} ({new.source})",
        "Rows": join(list(rows)),
        "Steps": f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "") if steps else "",
        "Date": today.isoformat(),
    }
    return [(name, value) for name, value in found.items() if value]


def _model(config: Mapping[str, Any]) -> str:
    """The builder's name, but for finch.models.auto, and the folder that the weights are from."""
    model, checkpointer = config.get("model") or {}, config.get("checkpointer") or {}
    builder = base_builder(config)
    path = str(model.get("path") or checkpointer.get("checkpoint_dir") or "")
    return ", ".join(str(one) for one in (builder if builder != "auto" else "", hub.origin(path) or path) if one)


def _training_rows(run: Run) -> str:
    """The file, and how many of its rows were trained, where the run's state is still there."""
    dataset = run.config.get("dataset")
    file = dataset.get("data_files") if isinstance(dataset, Mapping) else None
    if not isinstance(file, str):
        return ""
    number = run.num_rows
    return Path(file).name if number is None else f"{number:,} of {Path(file).name}"


def provenance(comparison: Comparison) -> dict[str, Sequence[str]]:
    """Lists by title: definitions, evaluations with their settings and versions, training data, and how numbers are computed."""
    measures = comparison.measures
    divergences = ", ".join(measure.name for measure in measures if measure.metric == "kl")
    explained = f"{divergences}: how far the model's next-token probabilities have moved from the pretrained model's: 0 before tuning, never less, so there is no test."
    return {
        "Tasks and their definitions": [f"{one.name} ({one.role}, {one.metric}): {one.definition}" for one in measures],
        "Evaluations": [*_evaluations(comparison), *_probe_steps(comparison)],
        "Training data": list(dict.fromkeys(_training_data(comparison))),
        "How numbers are computed": [*DEFINITIONS, *([explained] if divergences else [])],
    }


def _evaluations(comparison: Comparison) -> Iterator[str]:
    """Of each suite, the first run's."""
    results = {suite: one for run in reversed(comparison.runs) for suite, one in run.results.items()}
    for suite, result in sorted(results.items()):
        base = comparison.bases.get(suite)
        settings = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
        weights = "" if base is None else f"; pretrained weights {base.weights[:12]} ({base.model})"
        yield f"{suite}: {settings}; {versions}{weights}"


def _probe_steps(comparison: Comparison) -> Iterator[str]:
    steps = sorted({one.step for outcomes in comparison.outcomes for one in outcomes.values() if one.step is not None})
    if steps:
        plural = "s" if len(steps) > 1 else ""
        yield f"Probes: evaluated while training; numbers of step{plural} {', '.join(map(str, steps))}."


def _training_data(comparison: Comparison) -> Iterator[str]:
    for dataset in (run.config.get("dataset") for run in comparison.runs):
        if isinstance(dataset, dict):
            hidden = ("_component_", "column_map")
            shown = [f"{key}={value}" for key, value in dataset.items() if key not in hidden and value is not None]
            yield ", ".join(shown) or str(dataset.get("_component_"))


def commands(comparison: Comparison, options: Sequence[str]) -> list[str]:
    """Of one run's training, in a new folder, of one run's evaluations, and of this report.

    Args:
        options: of the report's own command line.
    """
    lines = []
    run = next((one for one in comparison.runs if one.config), None)
    if run is not None:
        words = [str(run.folder / run_files.CONFIG), f"output_dir={run.folder}_again"]
        # Of the run's own checkpoint the new folder has none.
        fresh = ["resume_from_checkpoint=False"] if run.config.get("resume_from_checkpoint") is True else []
        lines.append(["finch", "run", *words, *fresh])
    for run in comparison.runs:
        shared = sorted(comparison.bases.keys() & run.results.keys() - {CUSTOM})  # the folder of own tasks is not known
        if shared:
            for suite in shared:
                models = ["--base", comparison.bases[suite].model, "--tuned", str(run.folder)]
                lines.append(["finch", "evaluate", *models, *_evaluate_options(suite, run.results[suite])])
            break
    return [shlex.join(line) for line in [*lines, ["finch", "report", *options]]]


def _evaluate_options(suite: str, result: SuiteResult) -> list[str]:
    if suite not in SUITES:  # skills
        return ["--limit", str(max(task.n for task in result.tasks.values()))]
    tasks = [] if result.tasks.keys() >= set(SUITES[suite]) else ["--tasks", ",".join(result.tasks)]
    data, limit = (result.settings.get(name) for name in ("data", "limit"))
    root = [] if data in (None, "hub") else ["--data-root", str(data)]
    return ["--suite", suite, *tasks, *root, *([] if limit is None else ["--limit", str(limit)])]
