"""The report's sections: which figures and tables each has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finch.evaluation.results import POINTS
from finch.evaluation.tasks.confidence import stated_confidences
from finch.report.change_tables import changes_table, tasks_table, tests_table
from finch.report.figures.curves import Curve, draw_curves, running_mean
from finch.report.figures.front import draw_front
from finch.report.figures.reliability import Answers, Mark, draw_calibration, draw_scores
from finch.report.figures.style import Drawing
from finch.report.figures.trade_off import draw_trade_off
from finch.report.formatting import digits
from finch.report.front import Front
from finch.report.measures import Comparison, probe_values
from finch.report.page import Section
from finch.report.paper.numbers import (
    MODELS,
    TASKS,
    accuracy_curves,
    has_figure,
    learning_rate_curve,
    paper_model,
    paper_results,
)
from finch.report.paper_table import paper_table
from finch.report.provenance import (
    DEFINITIONS,
    commands,
    data_lines,
    definition_lines,
    divergence_line,
    probe_line,
    settings_lines,
)
from finch.report.reliability_table import reliability_table
from finch.report.runs import Run
from finch.report.runs_table import runs_table
from finch.report.selection import Measure
from finch.report.settings import Setting, TradeOff
from finch.report.tables import Names, shown_sign, units
from finch.report.trade_off_tables import difference_table, front_table, old_tasks_table, settings_table


@dataclass(frozen=True)
class Report:
    """Everything that the parts of a report are made of."""

    comparison: Comparison
    settings: Sequence[Setting]
    trade_off: TradeOff
    front: Front
    names: Names
    figures: Path

    @property
    def task(self) -> str | None:
        """A task of the paper's, where the new task is one."""
        new = self.comparison.new
        named = next((run.task for run in self.comparison.runs if run.task is not None), None)
        return next((name for name in (new.source if new else None, named) if name in TASKS), None)

    @property
    def model(self) -> str | None:
        """A model of the paper's, where the runs' model is one."""
        return next((model for run in self.comparison.runs if (model := paper_model(run)) is not None), None)

    def shown_runs(self) -> list[Run]:
        """For curves: of each method the setting with the best new-task score, else its first one with metrics."""
        best: dict[str, tuple[float, Setting]] = {}
        for point in self.trade_off.points:
            if point.setting is not None and self._has_metrics(point.setting):
                value = best.get(point.setting.method)
                if value is None or point.new.value > value[0]:
                    best[point.setting.method] = point.new.value, point.setting
        for setting in self.settings:
            if setting.method not in best and self._has_metrics(setting):
                best[setting.method] = -math.inf, setting
        chosen = [best[method][1] for method in self.names.styles if method in best]
        return [self.comparison.runs[number] for setting in chosen for number in setting.runs]

    def _has_metrics(self, setting: Setting) -> bool:
        return any(self.comparison.runs[number].metrics for number in setting.runs)


def _labels(report: Report) -> tuple[str, str]:
    """Of the axes: the new-task score, and the change of the old tasks."""
    new, old = report.comparison.new, report.comparison.old
    assert new is not None
    if len(old) > 1:
        are_losses = all(measure.is_probe and measure.metric == "loss" for measure in old)
        kind = "mean change of the probes' losses" if are_losses else "mean change of old tasks"
    else:
        kind = f"change of {old[0].name}"
    return (
        f"{new.name}: {new.metric}, {units([new], is_change=False)}",
        f"{kind}, {units(old, is_change=True)}",
    )


def trade_off_sections(report: Report) -> list[Section]:
    comparison, points, front = report.comparison, report.trade_off, report.front
    new, old = comparison.new, comparison.old
    if new is None or not old or not points.points:
        return []
    new_label, old_label = _labels(report)
    sign = (shown_sign(new), shown_sign(old[0]))
    styles = report.names.styles
    drawing = draw_trade_off(points, styles, report.figures, new_label=new_label, old_label=old_label, sign=sign)
    sections = [
        Section(
            "trade-off",
            "The trade-off",
            drawings=[drawing],
            tables=[settings_table(points, report.names, new, old)],
        )
    ]
    if not front.scores:
        return sections
    drawing = draw_front(
        front, styles, report.figures, new_label=new_label, old_label=old_label, sign=sign, places=digits(new.unit)
    )
    shown = [
        front_table(front, report.names, points, new, old),
        difference_table(front, report.names, new, old),
    ]
    text = (
        "A method that learned less has usually forgotten less: numbers of single settings do not say which method is better. Here each "
        "method's change of the old tasks is read off its own front where the new-task score is the same."
    )
    return [*sections, Section("front", "Forgetting at equal score", [text], [drawing], [one for one in shown if one])]


def changes_section(report: Report) -> list[Section]:
    comparison = report.comparison
    if not any(comparison.outcomes):
        return []
    shown = [
        old_tasks_table(report.trade_off, report.names, comparison.old, comparison.other_old),
        changes_table(comparison, report.names),
        tasks_table(comparison),
        tests_table(comparison, report.names),
    ]
    return [Section("changes", "Changes from the pretrained model", tables=[one for one in shown if one.rows])]


def reliability_section(report: Report) -> list[Section]:
    comparison, styles = report.comparison, report.names.styles
    if not any(measure.name in outcomes for measure in comparison.reliability for outcomes in comparison.outcomes):
        return []
    drawings = [one for measure in comparison.reliability if (one := _reliability_drawing(report, measure)) is not None]
    answers, base_answers = [], None
    chosen = report.shown_runs() or list(comparison.runs)
    for method in styles:
        pooled: tuple[list[float], list[float]] = ([], [])
        for number, run in enumerate(comparison.runs):
            if run.method != method or (run not in chosen and any(one.method == method for one in chosen)):
                continue
            for outcome in comparison.outcomes[number].values():
                for values, more in zip(pooled, stated_confidences(outcome.samples), strict=True):
                    values += more
                if base_answers is None and stated_confidences(outcome.base_samples)[0]:
                    base_answers = Answers(None, *stated_confidences(outcome.base_samples))
        if pooled[0]:
            answers.append(Answers(method, *pooled))
    if answers:
        every = answers if base_answers is None else [base_answers, *answers]
        which = "Of each method the setting with the best new-task score, its seeds together."
        drawings.append(draw_calibration(every, styles, report.figures, chosen=which))
    text = []
    if any("pick_longer" in one.others for outcomes in comparison.outcomes for one in outcomes.values()):
        text.append(
            "HaluEval: the hallucinated answer is nearly always the longer one, so a rule that needs no model, picking the longer answer, scores high. "
            "A score below that line shows less than knowing lengths."
        )
    return [Section("reliability", "Reliability", text, drawings, [reliability_table(comparison, report.names)])]


def _reliability_drawing(report: Report, measure: Measure) -> Drawing | None:
    """Against the new-task score; without one, against the learning rate."""
    comparison = report.comparison
    new = comparison.new
    marks, levels = [], {}
    base = None
    for number, run in enumerate(comparison.runs):
        outcomes = comparison.outcomes[number]
        one = outcomes.get(measure.name)
        if one is None:
            continue
        base = base or one.base
        if (baseline := one.others.get("pick_longer")) is not None:
            levels["picks the longer answer"] = baseline
        x = (
            outcomes[new.name].score.value * new.scale
            if new is not None and new.name in outcomes
            else run.learning_rate
        )
        if x is not None and (new is None or new.name in outcomes):
            marks.append(Mark(run.method, x, one.score))
    if not marks:
        return None
    if measure.chance is not None:
        levels["chance"] = measure.chance
    lower = "" if measure.is_higher_better else " Lower is better."
    return draw_scores(
        marks,
        base,
        [(value, text) for text, value in levels.items()],
        report.names.styles,
        report.figures,
        name=f"reliability_{measure.name}",
        title=f"{measure.name}, {measure.metric}",
        caption=f"A marker a run, with its 95% interval; the band is the pretrained model's.{lower}",
        x_label=_labels(report)[0]
        if new is not None and comparison.old
        else (new.name if new is not None else "learning rate"),
        y_label=_score_label(measure),
        scale=measure.scale,
        is_log=new is None,
    )


def _score_label(measure: Measure) -> str:
    if measure.unit != POINTS:
        return f"{measure.metric}, {units([measure], is_change=False)}"
    return f"{measure.metric}, %" if measure.is_higher_better else f"{measure.metric} x 100"


def curves_section(report: Report) -> list[Section]:
    runs = report.shown_runs()
    drawings = [*_probe_drawings(report, runs), *_schedule_drawings(report, runs)]
    if not drawings:
        return []
    is_chosen = len(runs) < len([run for run in report.comparison.runs if run.metrics])
    text = (
        ["Of each method the setting with the best new-task score (else its first), a curve a seed."]
        if is_chosen
        else []
    )
    return [Section("training", "Training", text, drawings)]


def _probe_drawings(report: Report, runs: Sequence[Run]) -> list[Drawing]:
    """The paper's Figure 1: the new task and the old ones over steps."""
    comparison, styles = report.comparison, report.names.styles
    drawings = []
    names = dict.fromkeys(
        key.split("/")[1] for run in runs for line in run.metrics for key in line if key.startswith("probe/")
    )
    new = comparison.new
    learned = new.key.split("/")[1] if new is not None and new.is_probe else None
    marked = {name for run in runs for name in names if ((run.config.get("probes") or {}).get(name) or {}).get("task")}
    for name in names:
        role = "new" if name in marked or name == learned else "old"
        for metric in ("accuracy", "loss", "kl"):
            values = {run.folder: probe_values(run, f"probe/{name}/{metric}") for run in runs}
            scale = 100.0 if metric == "accuracy" else 1.0
            curves = [
                Curve(
                    run.method,
                    [step for step, _ in values[run.folder]],
                    [scale * value for _, value in values[run.folder]],
                )
                for run in runs
                if len(values[run.folder]) > 0
            ]
            if not curves:
                continue
            paper = accuracy_curves(role) if metric == "accuracy" and has_figure(report.task, report.model) else []
            curves += [
                Curve(one.method, one.steps, [100 * value for value in one.values], is_paper=True)
                for one in paper
                if one.method in styles
            ]
            unit = {
                "accuracy": "accuracy, %",
                "loss": "loss, nats a token",
                "kl": "KL divergence, nats a token",
            }[metric]
            task = "new task" if role == "new" else "old task"
            drawings.append(
                draw_curves(
                    curves,
                    styles,
                    report.figures,
                    name=f"probe_{name}_{metric}",
                    title=f"Probe {name}, {task}",
                    caption=f"{metric.capitalize() if metric != 'kl' else 'KL divergence from the pretrained model'} on the probe's rows while training; step 0 is the pretrained model."
                    + (" Dotted: the paper's Figure 1." if paper else ""),
                    label=unit,
                )
            )
    return drawings


def _schedule_drawings(report: Report, runs: Sequence[Run]) -> list[Drawing]:
    rates, losses, products = [], [], []
    for run in runs:
        steps = run.steps
        lr = [(line["step"], line["lr"]) for line in steps if line.get("lr") is not None]
        loss = [(line["step"], line["loss"], line.get("ema_loss")) for line in steps if line.get("loss") is not None]
        product = [
            (line["step"], line["lr"] * math.sqrt(line["loss"]))
            for line in steps
            if line.get("loss") is not None and line.get("lr") is not None and line["loss"] >= 0
        ]
        if lr:
            rates.append(Curve(run.method, [step for step, _ in lr], [value for _, value in lr]))
        if loss:
            ema = [value for _, _, value in loss if value is not None]
            values = ema if len(ema) == len(loss) else running_mean([value for _, value, _ in loss])
            losses.append(Curve(run.method, [step for step, _, _ in loss], values))
        if product:
            smooth = running_mean([value for _, value in product])
            products.append(Curve(run.method, [step for step, _ in product], smooth))
    if not rates and not losses:
        return []
    styles, folder = report.names.styles, report.figures
    is_paper = has_figure(report.task, report.model) and "finch" in styles
    paper = []
    if is_paper:
        one = learning_rate_curve()
        paper = [Curve(one.method, one.steps, one.values, is_paper=True)]
    return [
        draw_curves(
            [*rates, *paper],
            styles,
            folder,
            name="learning_rate",
            title="Learning rate",
            caption="Of each step." + (" Dotted: the paper's Figure 1." if is_paper else ""),
            label="learning rate",
            from_zero=True,
            is_scientific=True,
        ),
        draw_curves(
            losses,
            styles,
            folder,
            name="loss",
            title="Training loss",
            caption="FINCH: the EMA that sets its learning rate. Other methods: a running mean.",
            label="loss, nats a token",
            from_zero=True,
        ),
        draw_curves(
            products,
            styles,
            folder,
            name="eta_sqrt_loss",
            title="Learning rate x sqrt(loss)",
            caption="The leading term of the bound on a step's forgetting (Theorem 1), a running mean: FINCH keeps it level until its cap.",
            label="eta * sqrt(loss)",
            from_zero=True,
            is_scientific=True,
        ),
    ]


def paper_section(report: Report) -> list[Section]:
    paper = paper_results(report.task, report.model)
    comparison = report.comparison
    compared = [measure for measure in (comparison.new, *comparison.old) if measure is not None]
    if not paper or any(measure.is_probe or measure.unit != POINTS for measure in compared):
        return []
    table = paper_table(comparison, report.trade_off, report.names, paper)
    text = (
        f"Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates (2026), task {report.task}, {MODELS[str(report.model)]}. "
        "Its rows are marked paper; data splits, prompts and harness may differ."
    )
    return [Section("paper", "The paper's numbers", [text], tables=[table])]


def origin_section(report: Report, options: Sequence[str]) -> list[Section]:
    """
    Args:
        options: of the report's own command line.
    """
    comparison = report.comparison
    lists: Mapping[str, Sequence[str]] = {
        "Tasks and their definitions": definition_lines(comparison),
        "Evaluations": settings_lines(comparison) + probe_line(comparison),
        "Training data": data_lines(comparison),
        "How numbers are computed": DEFINITIONS + divergence_line(comparison),
    }
    return [
        Section(
            "origin",
            "Where the numbers come from",
            tables=[runs_table(comparison, report.names)],
            lists=[(title, items) for title, items in lists.items() if items],
            commands=commands(comparison, options),
        )
    ]
