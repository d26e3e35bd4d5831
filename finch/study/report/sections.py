"""The report's sections: which figures and tables each has."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any

from finch.base import run_files
from finch.base.errors import UserError
from finch.evaluation.results import POINTS
from finch.evaluation.skill_changes import SUITE, Skill, compare
from finch.evaluation.skills_page import MEASURE, side_by_side
from finch.evaluation.tasks.confidence import stated_confidences
from finch.study.report import figures, tables
from finch.study.report.content import Report
from finch.study.report.paper import MODELS, Curve, accuracy_curves, learning_rate_curves, paper_results
from finch.study.report.runs import Run
from finch.study.report.selection import Measure, task_probes
from finch.study.report.style import PRETRAINED, Drawing, Style
from finch.study.report.summary import commands, provenance
from finch.study.report.tables import Table
from finch.study.sweep.select_lr import MAX_FORGETTING, Rate, rates_of, select_rate, table
from finch.training.style import LESS_FORGOTTEN, MORE_LEARNED

PROBE_METRICS = {
    "accuracy": ("Accuracy", "accuracy, %", 100.0),
    "loss": ("Loss", "loss, nats per token", 1.0),
    "kl": ("KL divergence from the pretrained model", "KL divergence, nats per token", 1.0),
}
"""A probe's metric: in its caption, on its axis, and from its values to what is shown."""
_Smooth = Callable[[Sequence[float]], Sequence[float]]
_OVER_DOSE = (
    "A curve per run of all settings. Each step adds its learning rate x sqrt(loss), the leading term of what it can forget (the paper's Theorem 1 and "
    "Corollary 1). Where runs share one curve, this sum alone decides what is forgotten; what lies above it forgets less at the same sum."
)


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        identifier: of its heading, for links.
        text: paragraphs.
        lists: (title, items).
        commands: shown as code.
        skills: what :func:`finch.evaluation.skills_page.side_by_side` has found; shown on the page alone, the table has the numbers.
    """

    identifier: str
    title: str
    text: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    commands: Sequence[str] = ()
    skills: Mapping[str, Any] | None = None


def make_sections(report: Report, options: Sequence[str]) -> list[Section]:
    """
    Args:
        options: of the report's own command line.
    """
    parts = (
        _trade_off_sections,
        _changes_section,
        _skills_section,
        _reliability_section,
        _small_lr_section,
        _training_section,
        _paper_section,
    )
    return [*(section for part in parts for section in part(report)), _origin_section(report, options)]


def _trade_off_sections(report: Report) -> Iterator[Section]:
    if not report.trade_off.points:
        return
    drawing = figures.draw_trade_off(report)
    if not report.front.scores:
        yield Section("trade-off", "The trade-off", drawings=[drawing], tables=[tables.settings_table(report)])
        return
    text = (
        "A method that has learned less has usually forgotten less too, so methods are compared where they have learned equally much. A method's "
        "front is its best settings, those that none of its others beats both in learning and in keeping, joined by straight lines that begin at the "
        "pretrained model. What the method forgets at a new-task score is read off these lines."
    )
    yield Section("trade-off", "The trade-off", drawings=[drawing, figures.draw_front(report)])
    shown = [*tables.front_tables(report), tables.settings_table(report)]
    yield Section("front", "Forgetting at equal score", [text], tables=shown)


def _changes_section(report: Report) -> Iterator[Section]:
    makers = (tables.old_tasks_table, tables.changes_table, tables.tasks_table, tables.tests_table)
    shown = [table for maker in makers if (table := maker(report)).rows]
    if any(report.comparison.outcomes):
        yield Section("changes", "Changes from the pretrained model", tables=shown)


def _skills_section(report: Report) -> Iterator[Section]:
    found: dict[str, Sequence[Skill]] = {}
    for run in report.shown_runs or report.comparison.runs:
        if (
            SUITE in run.results
            and run.results[SUITE].base is not None
            and "by_text" not in run.results[SUITE].settings
        ):
            found.setdefault(report.names.of(run), compare(run.result_path(SUITE).parent))
    if found:
        text = f"A bar is {MEASURE}, the line its 95% interval over prompts."
        shown = [tables.skills_table(found)]
        yield Section("skills", "What was forgotten, by skill", [text], tables=shown, skills=side_by_side(found))


def _reliability_section(report: Report) -> Iterator[Section]:
    comparison = report.comparison
    if not any(measure.name in outcomes for measure in comparison.reliability for outcomes in comparison.outcomes):
        return
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
    yield Section("reliability", "Reliability", text, drawings, [tables.reliability_table(report)])


def _stated_answers(report: Report) -> list[tuple[Style, figures.Answers]]:
    """Answers with a stated confidence: the pretrained model's, and those of each method's shown runs."""
    every = report.comparison.by_run
    bases, answers = [], []
    for method, style in report.names.styles.items():
        outcomes = [those for run, those in every if run.method == method and run in report.shown_runs]
        outcomes = outcomes or [those for run, those in every if run.method == method]
        found = [outcome for those in outcomes for outcome in those.values()]
        answers.append((style, stated_confidences([sample for outcome in found for sample in outcome.samples])))
        bases += [(PRETRAINED, stated_confidences(outcome.base_samples)) for outcome in found]
    bases, answers = ([(style, stated) for style, stated in those if stated[0]] for those in (bases, answers))
    return [*bases[:1], *answers] if answers else []


def _reliability_drawing(report: Report, measure: Measure) -> Drawing | None:
    """Against the new-task score; without one, against the learning rate."""
    new = report.comparison.new
    found = [(run, outcomes) for run, outcomes in report.comparison.by_run if measure.name in outcomes]
    marks = []
    levels: dict[str, float] = {}
    for run, outcomes in found:
        one = outcomes[measure.name]
        if (baseline := one.others.get("pick_longer")) is not None:
            levels["picks the longer answer"] = baseline
        score = None if new is None or new.name not in outcomes else outcomes[new.name].score.value * new.scale
        x = run.learning_rate if new is None else score
        if x is not None:
            marks.append((run.method, x, one.score))
    if not marks:
        return None
    if measure.chance is not None:
        levels["chance"] = measure.chance
    base = next((outcomes[measure.name].base for _, outcomes in found if outcomes[measure.name].base), None)
    return figures.draw_reliability(report, marks, base, levels, measure)


def _small_lr_section(report: Report) -> Iterator[Section]:
    """The paper's rule, where the report has SFT at several rates of a sweep."""
    runs = [run.folder for run in report.comparison.runs if run.results and (run.folder / run_files.CELL).is_file()]
    rates: Sequence[Rate] = ()
    with contextlib.suppress(UserError):  # none, no old tasks or too few documents: the command says which
        rates = rates_of(runs, "sft")
    if len(rates) > 1:
        chosen = select_rate(rates, MAX_FORGETTING)
        text = (
            f"The paper's rule takes the largest rate of SFT that forgets less than {MAX_FORGETTING:g} points on average: "
            f"{'none' if chosen is None else f'{chosen.lr:g}'}. All evaluated old tasks in points count. One half of their documents chooses, the other says what it forgets. "
            "For another method or limit: finch report --select-lr."
        )
        shown = {column for row in table(rates) for column, cell in row.items() if cell}
        rows = [{column: cell for column, cell in row.items() if column in shown} for row in table(rates)]
        yield Section("small-lr", "SFT's learning rates", [text], tables=[Table("Points forgotten on average", rows)])


def _training_section(report: Report) -> Iterator[Section]:
    runs = report.shown_runs
    drawings = [*_probe_drawings(report), *_schedule_drawings(report)]
    is_chosen = len(runs) < sum(bool(run.metrics) for run in report.comparison.runs)
    text = [f"{report.which_settings} (else its first), a curve per seed."] if is_chosen else []
    if drawings:
        yield Section("training", "Training", text, drawings)


def _probe_drawings(report: Report) -> Iterator[Drawing]:
    """The paper's Figure 1: the new task and the old ones over steps."""
    runs, new = report.shown_runs, report.comparison.new
    names = dict.fromkeys(
        key.split("/")[1] for run in runs for line in run.metrics for key in line if key.startswith("probe/")
    )
    learned = {name for run in runs for name in task_probes(run)}
    if new is not None and new.key.startswith("probe/"):
        learned.add(new.key.split("/")[1])
    for name in names:
        role, arrow = ("new", MORE_LEARNED) if name in learned else ("old", LESS_FORGOTTEN)
        for metric, (caption, label, scale) in PROBE_METRICS.items():
            curves = [curve for run in runs for curve in _curve(run, f"probe/{name}/{metric}", scale)]
            if not curves:
                continue
            if metric == "accuracy":
                curves += accuracy_curves(*report.paper_task, role)
            text = f"{caption} on the probe's rows while training; step 0 is the pretrained model."
            what = f"probe_{name}_{metric}", f"Probe {name}, {role} task", text, f"{label}\n{arrow}"
            yield figures.draw_curves(report, curves, *what, is_inverted=metric != "accuracy")
            if metric == "kl":
                curves = [
                    one for run in report.comparison.runs for one in _curve(run, f"probe/{name}/kl", over_dose=True)
                ]
                what = f"dose_{name}", f"Forgotten over the dose, probe {name}", _OVER_DOSE, f"{label}\n{arrow}"
                yield figures.draw_curves(report, curves, *what, x_label="sum of eta * sqrt(loss)", is_inverted=True)


def _schedule_drawings(report: Report) -> Iterator[Drawing]:
    rates: list[Curve] = []
    losses: list[Curve] = []
    products: list[Curve] = []
    for run in report.shown_runs:
        has_average = all(line.get("ema_loss") is not None for line in run.steps if line.get("loss") is not None)
        rates += _curve(run, "lr")
        losses += _curve(run, "ema_loss") if has_average else _curve(run, "loss", smooth=figures.running_mean)
        products += _curve(run, "eta_sqrt_loss", smooth=figures.running_mean)
    if not rates and not losses:
        return
    rates += learning_rate_curves(*report.paper_task)
    of_loss = "A moving average; for FINCH the one that sets its learning rate."
    of_product = "The more a step can forget, the larger this is (the paper's Theorem 1); a running mean. FINCH keeps it level until its rate reaches the cap."
    draw = functools.partial(figures.draw_curves, report, from_zero=True)
    yield draw(rates, "learning_rate", "Learning rate", "Of each step.", "learning rate", is_scientific=True)
    yield draw(losses, "loss", "Training loss", of_loss, "loss, nats per token")
    what = "eta_sqrt_loss", "Learning rate x sqrt(loss)", of_product, "eta * sqrt(loss)"
    yield draw(products, *what, is_scientific=True)


def _curve(
    run: Run, key: str, scale: float = 1.0, *, smooth: _Smooth = list, over_dose: bool = False
) -> Iterator[Curve]:
    """A value of metrics.jsonl over steps, or over the sum of eta x sqrt(loss) where it is known; nothing where no line has it."""
    doses = accumulate(run.metrics, run_files.add_dose, initial=0.0) if over_dose else repeat(0.0)
    lines = [(dose, line) for dose, line in zip(doses, run.metrics, strict=False) if line.get(key) is not None]
    known = [(dose if over_dose else line["step"], scale * line[key]) for dose, line in lines if math.isfinite(dose)]
    if known:
        steps, values = zip(*known, strict=True)
        yield Curve(run.method, steps, smooth(values))


def _paper_section(report: Report) -> Iterator[Section]:
    task, model = report.paper_task
    paper = paper_results(task, model)
    compared = [measure for measure in (report.comparison.new, *report.comparison.old) if measure is not None]
    if not paper or any(measure.is_probe or measure.unit != POINTS for measure in compared):
        return
    text = (
        f"Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates (2026), task {task}, {MODELS[str(model)]}. "
        "Its rows are marked paper; data splits, prompts and harness may differ."
    )
    yield Section("paper", "The paper's numbers", [text], tables=[tables.paper_table(report, paper)])


def _origin_section(report: Report, options: Sequence[str]) -> Section:
    return Section(
        "origin",
        "Where the numbers come from",
        tables=[tables.runs_table(report)],
        lists=[(title, items) for title, items in provenance(report.comparison).items() if items],
        commands=commands(report.comparison, options),
    )
