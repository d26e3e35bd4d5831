"""The report's sections: which figures and tables each has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finch.evaluation.results import POINTS
from finch.evaluation.tasks.confidence import stated_confidences
from finch.study.report import figures, tables
from finch.study.report.figures import Curve
from finch.study.report.front import Front, Setting, TradeOff, choose_by
from finch.study.report.measures import Comparison
from finch.study.report.paper import MODELS, TASKS, accuracy_curves, learning_rate_curves, paper_model, paper_results
from finch.study.report.runs import Run
from finch.study.report.selection import Measure, task_probes
from finch.study.report.summary import commands, provenance
from finch.study.report.tables import Names, Table
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED, PRETRAINED, Drawing, Style

PROBE_METRICS = {
    "accuracy": ("Accuracy", "accuracy, %", 100.0),
    "loss": ("Loss", "loss, nats per token", 1.0),
    "kl": ("KL divergence from the pretrained model", "KL divergence, nats per token", 1.0),
}
"""A probe's metric: in its caption, on its axis, and from its values to what is shown."""


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        identifier: of its heading, for links.
        text: paragraphs.
        lists: (title, items).
        commands: shown as code.
    """

    identifier: str
    title: str
    text: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """Everything that the parts of a report are made of.

    Attributes:
        folder: for the figures.
    """

    comparison: Comparison
    settings: Sequence[Setting]
    trade_off: TradeOff
    front: Front
    names: Names
    folder: Path

    @cached_property
    def task(self) -> str | None:
        """A task of the paper's, where the new task is one."""
        new = self.comparison.new
        named = next((run.task for run in self.comparison.runs if run.task is not None), None)
        return next((name for name in (new.source if new else None, named) if name in TASKS), None)

    @cached_property
    def model(self) -> str | None:
        """A model of the paper's, where the runs' model is one."""
        return next((model for run in self.comparison.runs if (model := paper_model(run)) is not None), None)

    @property
    def which_settings(self) -> str:
        """What ``shown_runs`` are."""
        return f"Of each method the setting with the best {choose_by(self.comparison, self.trade_off)[1]}"

    @cached_property
    def shown_runs(self) -> list[Run]:
        """For curves: of each method the best setting, else its first one with metrics."""
        runs = self.comparison.runs
        scores, _ = choose_by(self.comparison, self.trade_off)
        best: dict[str, Setting] = {}
        for setting in sorted(self.settings, key=lambda one: -scores.get(one, -math.inf)):
            if any(runs[number].metrics for number in setting.runs):
                best.setdefault(setting.method, setting)
        return [runs[number] for method in self.names.styles if method in best for number in best[method].runs]


def make_sections(report: Report, options: Sequence[str]) -> list[Section]:
    """
    Args:
        options: of the report's own command line.
    """
    return [
        *_trade_off_sections(report),
        *_changes_section(report),
        *_reliability_section(report),
        *_curves_section(report),
        *_paper_section(report),
        _origin_section(report, options),
    ]


def _trade_off_sections(report: Report) -> list[Section]:
    comparison, points, front, names = report.comparison, report.trade_off, report.front, report.names
    new, old = comparison.new, comparison.old
    if new is None or not old or not points.points:
        return []
    if len(old) > 1:
        are_losses = all(measure.is_probe and measure.metric == "loss" for measure in old)
        kind = "mean change of the probes' losses" if are_losses else "mean change of old tasks"
    else:
        kind = f"change of {old[0].name}"
    axes = new, old[0], f"{kind}, {old[0].change_unit}"
    drawing = figures.draw_trade_off(points, names.styles, report.folder, *axes)
    settings = tables.settings_table(points, names, new, old)
    if not front.scores:
        return [Section("trade-off", "The trade-off", drawings=[drawing], tables=[settings])]
    beside = figures.draw_front(front, names.styles, report.folder, *axes)
    shown = [*tables.front_tables(front, names, points, new, old[0]), settings]
    text = (
        "A method that has learned less has usually forgotten less too, so methods are compared where they have learned equally much. A method's "
        "front is its best settings, those that none of its others beats both in learning and in keeping, joined by straight lines that begin at the "
        "pretrained model. What the method forgets at a new-task score is read off these lines."
    )
    return [
        Section("trade-off", "The trade-off", drawings=[drawing, beside]),
        Section("front", "Forgetting at equal score", [text], tables=shown),
    ]


def _changes_section(report: Report) -> list[Section]:
    comparison, names = report.comparison, report.names
    if not any(comparison.outcomes):
        return []
    shown = [
        tables.old_tasks_table(report.trade_off, names, comparison),
        tables.changes_table(comparison, names),
        tables.tasks_table(comparison),
        tables.tests_table(comparison, names),
    ]
    return [Section("changes", "Changes from the pretrained model", tables=[one for one in shown if one.rows])]


def _reliability_section(report: Report) -> list[Section]:
    comparison = report.comparison
    if not any(measure.name in outcomes for measure in comparison.reliability for outcomes in comparison.outcomes):
        return []
    drawings = [one for measure in comparison.reliability if (one := _reliability_drawing(report, measure)) is not None]
    answers = _stated_answers(report)
    if answers:
        chosen = f"{report.which_settings}, its seeds together."
        drawings.append(figures.draw_calibration(answers, report.folder, chosen))
    text = []
    if any("pick_longer" in one.others for outcomes in comparison.outcomes for one in outcomes.values()):
        text.append(
            "HaluEval: the hallucinated answer is nearly always the longer one, so a rule that needs no model, picking the longer answer, scores high. "
            "A score below that line shows less than knowing lengths."
        )
    return [Section("reliability", "Reliability", text, drawings, [tables.reliability_table(comparison, report.names)])]


def _stated_answers(report: Report) -> list[tuple[Style, figures.Answers]]:
    """Answers with a stated confidence: the pretrained model's, and those of each method's shown runs."""
    comparison = report.comparison
    shown = report.shown_runs
    bases, answers = [], []
    for method, style in report.names.styles.items():
        numbers = [number for number, run in enumerate(comparison.runs) if run.method == method]
        numbers = [number for number in numbers if comparison.runs[number] in shown] or numbers
        outcomes = [outcome for number in numbers for outcome in comparison.outcomes[number].values()]
        samples = [sample for outcome in outcomes for sample in outcome.samples]
        answers.append((style, stated_confidences(samples)))
        bases += [(PRETRAINED, stated_confidences(outcome.base_samples)) for outcome in outcomes]
    bases, answers = ([(style, stated) for style, stated in those if stated[0]] for those in (bases, answers))
    return [*bases[:1], *answers] if answers else []


def _reliability_drawing(report: Report, measure: Measure) -> Drawing | None:
    """Against the new-task score; without one, against the learning rate."""
    comparison = report.comparison
    new = comparison.new
    marks, base = [], None
    levels: dict[str, float] = {}
    for run, outcomes in zip(comparison.runs, comparison.outcomes, strict=True):
        one = outcomes.get(measure.name)
        if one is None:
            continue
        base = base or one.base
        if (baseline := one.others.get("pick_longer")) is not None:
            levels["picks the longer answer"] = baseline
        if new is None:
            x = run.learning_rate
        else:
            x = outcomes[new.name].score.value * new.scale if new.name in outcomes else None
        if x is not None:
            marks.append((run.method, x, one.score))
    if not marks:
        return None
    if measure.chance is not None:
        levels["chance"] = measure.chance
    return figures.draw_reliability(marks, base, levels, report.names.styles, report.folder, measure, new)


def _curves_section(report: Report) -> list[Section]:
    runs = report.shown_runs
    drawings = [*_probe_drawings(report, runs), *_schedule_drawings(report, runs)]
    if not drawings:
        return []
    is_chosen = len(runs) < sum(bool(run.metrics) for run in report.comparison.runs)
    text = [f"{report.which_settings} (else its first), a curve per seed."] if is_chosen else []
    return [Section("training", "Training", text, drawings)]


def _probe_drawings(report: Report, runs: Sequence[Run]) -> list[Drawing]:
    """The paper's Figure 1: the new task and the old ones over steps."""
    styles, new = report.names.styles, report.comparison.new
    names = dict.fromkeys(
        key.split("/")[1] for run in runs for line in run.metrics for key in line if key.startswith("probe/")
    )
    learned = {name for run in runs for name in task_probes(run)}
    if new is not None and new.is_probe:
        learned.add(new.key.split("/")[1])
    drawings = []
    for name in names:
        for metric, (caption, label, scale) in PROBE_METRICS.items():
            key = f"probe/{name}/{metric}"
            found = [(run, [line for line in run.metrics if line.get(key) is not None]) for run in runs]
            curves = [_curve(run, lines, [scale * line[key] for line in lines]) for run, lines in found if lines]
            if not curves:
                continue
            role = "new" if name in learned else "old"
            arrow = MORE_LEARNED if role == "new" else LESS_FORGOTTEN
            if metric == "accuracy":
                paper = accuracy_curves(report.task, report.model, role)
                curves += [one for one in paper if one.method in styles]
            text = f"{caption} on the probe's rows while training; step 0 is the pretrained model."
            what = curves, f"probe_{name}_{metric}", f"Probe {name}, {role} task", text, f"{label}\n{arrow}"
            drawings.append(figures.draw_curves(*what, styles, report.folder, is_inverted=metric != "accuracy"))
    return drawings


def _schedule_drawings(report: Report, runs: Sequence[Run]) -> list[Drawing]:
    rates, losses, products = [], [], []
    for run in runs:
        with_rate = [line for line in run.steps if line.get("lr") is not None]
        with_loss = [line for line in run.steps if line.get("loss") is not None]
        with_both = [line for line in with_loss if line.get("lr") is not None and line["loss"] >= 0]
        if with_rate:
            rates.append(_curve(run, with_rate, [line["lr"] for line in with_rate]))
        if with_loss:
            ema = [line["ema_loss"] for line in with_loss if line.get("ema_loss") is not None]
            is_whole = len(ema) == len(with_loss)
            average = ema if is_whole else figures.running_mean([line["loss"] for line in with_loss])
            losses.append(_curve(run, with_loss, average))
        if with_both:
            bounds = [line["lr"] * math.sqrt(line["loss"]) for line in with_both]
            products.append(_curve(run, with_both, figures.running_mean(bounds)))
    if not rates and not losses:
        return []
    styles, folder = report.names.styles, report.folder
    paper = [one for one in learning_rate_curves(report.task, report.model) if one.method in styles]
    of_loss = "A moving average; for FINCH the one that sets its learning rate."
    of_product = "The more a step can forget, the larger this is (the paper's Theorem 1); a running mean. FINCH keeps it level until its rate reaches the cap."
    return [
        figures.draw_curves(*what, styles, folder, from_zero=True, is_scientific=is_scientific)
        for is_scientific, what in (
            (True, ([*rates, *paper], "learning_rate", "Learning rate", "Of each step.", "learning rate")),
            (False, (losses, "loss", "Training loss", of_loss, "loss, nats per token")),
            (True, (products, "eta_sqrt_loss", "Learning rate x sqrt(loss)", of_product, "eta * sqrt(loss)")),
        )
    ]


def _curve(run: Run, lines: Sequence[Mapping[str, Any]], values: Sequence[float]) -> Curve:
    return Curve(run.method, [line["step"] for line in lines], values)


def _paper_section(report: Report) -> list[Section]:
    paper = paper_results(report.task, report.model)
    comparison = report.comparison
    compared = [measure for measure in (comparison.new, *comparison.old) if measure is not None]
    if not paper or any(measure.is_probe or measure.unit != POINTS for measure in compared):
        return []
    table = tables.paper_table(comparison, report.trade_off, report.names, paper)
    text = (
        f"Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates (2026), task {report.task}, {MODELS[str(report.model)]}. "
        "Its rows are marked paper; data splits, prompts and harness may differ."
    )
    return [Section("paper", "The paper's numbers", [text], tables=[table])]


def _origin_section(report: Report, options: Sequence[str]) -> Section:
    comparison = report.comparison
    return Section(
        "origin",
        "Where the numbers come from",
        tables=[tables.runs_table(comparison, report.names)],
        lists=[(title, items) for title, items in provenance(comparison).items() if items],
        commands=commands(comparison, options),
    )
