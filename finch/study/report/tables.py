"""The report's tables, as rows of text, and summary.csv: how numbers are written."""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finch.base import run_files
from finch.base.log import printable
from finch.evaluation import skill_changes
from finch.evaluation.results import OLD, POINTS, Sample
from finch.evaluation.skill_changes import Skill
from finch.evaluation.statistics import FEW_DOCUMENTS, Z, expected_calibration_error, half_width
from finch.evaluation.tasks.confidence import stated_confidences
from finch.study.report.content import Report
from finch.study.report.front import TradeOff, on_front, points_by_method
from finch.study.report.measures import Comparison, Estimate, Outcome
from finch.study.report.paper import METRICS
from finch.study.report.runs import BATCH_SIZE, Run
from finch.study.report.selection import Measure

MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
SIGNIFICANT = 0.05
LONG = 24
"""Rows of a table by run from which on it is folded."""
CSV_COLUMNS = (
    *("run", "method", "learning_rate", "batch_size", "seed", "task", "role", "source", "metric", "n"),
    *("score", "score_low", "score_high", "base_score", "delta", "standard_error", "delta_low", "delta_high"),
    *("p_value", "p_holm", "test", "step", "unit", "accuracy", "base_accuracy"),
)

Row = dict[str, str]
"""A table's row by its columns."""


@dataclass(frozen=True)
class Table:
    """Rows of text, all of the same columns.

    Attributes:
        text_columns: columns that are words; the others, but for the first one, are numbers, aligned to the right.
    """

    title: str
    rows: Sequence[Row]
    note: str = ""
    text_columns: Sequence[str] = ()

    def is_text(self, column: str) -> bool:
        return column in (next(iter(self.rows[0])), *self.text_columns)

    @property
    def is_long(self) -> bool:
        """Whether it is folded on the page."""
        return "run" in self.rows[0] and len(self.rows) > LONG


def number(value: float | None, places: int, *, sign: bool = False) -> str:
    """A rounded number, zero without a sign; a dash for None."""
    if value is None:
        return NONE
    rounded = round(value, places) + 0.0
    return f"{rounded:{'+' if sign and rounded else ''}.{places}f}".replace("-", MINUS)


def estimate(one: Estimate, places: int, *, sign: bool = False, unit: str = "") -> str:
    """``-3.1 [-4.0, -2.2]``, with the unit after the number; without brackets where there is no interval."""
    text = number(one.value, places, sign=sign) + unit
    return f"{text} [{', '.join(number(end, places, sign=sign) for end in one.ends)}]" if one.ends else text


def equal_score(value: float, measure: Measure) -> str:
    """A common score of the fronts: ``70.0%``."""
    return number(measure.sign * value, measure.places) + ("%" if measure.unit == POINTS else " nats")


def average(comparison: Comparison, outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """The mean change of the old tasks, in the direction of the first one; None where one of them is missing.

    Its standard error is sqrt(sum of squared standard errors) / number of tasks: tasks are independent.
    """
    old = comparison.old
    found = [outcomes[measure.name] for measure in old if measure.name in outcomes]
    deltas = [one.delta.times(one.measure.sign * old[0].sign) for one in found if one.delta]
    if not deltas or len(deltas) < len(old):
        return None
    mean = statistics.fmean(one.value for one in deltas)
    errors = [one.standard_error for one in deltas if one.standard_error is not None]
    if len(errors) < len(deltas):
        return Estimate(mean)
    error = math.sqrt(math.fsum(one**2 for one in errors)) / len(deltas)
    return Estimate(mean, error, mean - Z * error, mean + Z * error)


def _text(value: object) -> str:
    return NONE if value is None else str(value)


def _p_value(value: float | None) -> str:
    return "<0.001" if value is not None and value < 0.001 else number(value, 3)


def _shown(one: Estimate | None, measure: Measure, *, sign: bool = False) -> str:
    """An outcome's estimate in the unit that is shown."""
    return NONE if one is None else estimate(one.times(measure.scale), measure.places, sign=sign)


def _turned(one: Estimate | None, measure: Measure, *, sign: bool = True) -> str:
    """An estimate of the trade-off, where more is better, in the measure's own direction."""
    return NONE if one is None else estimate(one.times(measure.sign), measure.places, sign=sign)


def _change_cell(one: Outcome | None) -> str:
    if one is None or one.delta is None:
        return NONE
    star = "*" if one.p_holm is not None and one.p_holm < SIGNIFICANT else ""
    return _shown(one.delta, one.measure, sign=True) + star


def _change_title(measure: Measure) -> str:
    metric = f" ({measure.metric})" if measure.is_probe else ""
    direction = "" if measure.is_higher_better or measure.unit != POINTS else ", lower is better"
    return f"{measure.title}{metric}, {measure.change_unit}{direction}"


def _mean_titles(comparison: Comparison) -> list[str]:
    """The column with the mean over the trade-off's old tasks, where there are several."""
    names = ", ".join(one.name for one in comparison.old) if comparison.other_old else "old tasks"
    return [f"mean of {names}"] if len(comparison.old) > 1 else []


def _intervals_text(trade_off: TradeOff) -> str:
    return f", [95% intervals over {trade_off.drawn}]" if trade_off.has_intervals else ""


def _run_cells(report: Report, run: Run) -> Row:
    return {"run": report.names.of(run), "seed": _text(run.seed)}


def settings_table(report: Report) -> Table:
    """Each setting's place in the trade-off: mean over seeds, interval, range, and whether no other setting beats it."""
    trade_off, new, old = report.trade_off, report.new, report.old
    front = on_front(trade_off.points)
    score, change = f"{new.name}, {new.score_unit}", f"old tasks, {old.change_unit}"
    rows = [
        {
            "setting": report.names.of(point.setting),
            score: _turned(point.new, new, sign=False),
            change: _turned(point.old, old),
            "not dominated": "yes" if point in front else "",
            "seeds": str(len(point.runs)),
            f"{new.name}: range": _range([new.sign * one for one, _ in point.runs], new.places),
            "old tasks: range": _range([old.sign * other for _, other in point.runs], old.places, sign=True),
        }
        for point in trade_off.points
    ]
    if trade_off.base is not None:
        cells = {score: _turned(trade_off.base.new, new, sign=False), change: number(0, old.places)}
        rows.append(dict.fromkeys(rows[0], "") | {"setting": "pretrained"} | cells)
    names = [one.name for one in report.comparison.old]
    of = "unweighted mean of the changes of" if len(names) > 1 else "the change of"
    note = f"Means over seeds{_intervals_text(trade_off)}. Old tasks: {of} {', '.join(names)}."
    return Table("Settings", rows, note)


def _range(values: Sequence[float], places: int, *, sign: bool = False) -> str:
    if len(values) < 2:
        return ""
    return f"{number(min(values), places, sign=sign)} to {number(max(values), places, sign=sign)}"


def front_tables(report: Report) -> list[Table]:
    """Each method's change of the old tasks at each common score, and its difference from the reference's, of two methods or more."""
    front, trade_off, new, old = report.front, report.trade_off, report.new, report.old
    titles = [f"at {equal_score(score, new)}" for score in front.scores]
    points = points_by_method(trade_off)
    changes, differences = [], []
    for method, values in front.methods.items():
        label = {"method": report.names.styles[method].label}
        cells = [
            f"reaches {equal_score(front.highest[method], new)}"
            if value.change is None
            else _turned(value.change, old) + (" †" if value.is_extrapolated else "")
            for value in values
        ]
        num_runs = sum(len(point.runs) for point in points[method])
        counts = {"settings": str(len(points[method])), "runs": str(num_runs)}
        changes.append(label | dict(zip(titles, cells, strict=True)) | counts)
        if method != front.reference:
            others = front.methods[front.reference]
            cells = [
                _turned(one.difference, old)
                + (" †" if one.difference and (one.is_extrapolated or other.is_extrapolated) else "")
                for one, other in zip(values, others, strict=True)
            ]
            differences.append(label | dict(zip(titles, cells, strict=True)))
    change = Table(
        f"Change of the old tasks, {old.change_unit}, at equal {new.name}",
        changes,
        (f"[95% intervals of a bootstrap over {trade_off.drawn}.] " if trade_off.has_intervals else "")
        + "† is a guess, on a straight line from the pretrained model: the method has no setting that learned so little.",
    )
    difference = Table(
        f"Difference from {report.names.styles[front.reference].label}, {old.change_unit}",
        differences,
        f"{'Above' if old.sign > 0 else 'Below'} 0: forgets less. Both methods are compared on the same documents and seeds. An interval that "
        "includes 0 shows no difference. † as above: a guess.",
    )
    return [change, difference] if differences else [change]


def old_tasks_table(report: Report) -> Table:
    """Each setting's change on each old task, mean over seeds; on those outside the trade-off where all its runs have one."""
    comparison, points = report.comparison, report.trade_off.points
    others = [one for one in comparison.other_old if all(one.name in point.tasks for point in points)]
    rows = []
    for point in points:
        row = {"setting": report.names.of(point.setting)}
        row |= {_change_title(one): _turned(point.tasks[one.name], one) for one in (*comparison.old, *others)}
        rows.append(row | {title: _turned(point.old, report.old) for title in _mean_titles(comparison)})
    note = f"Tuned minus pretrained, means over seeds{_intervals_text(report.trade_off)}."
    return Table("Old tasks by setting", rows, note)


def changes_table(report: Report) -> Table:
    """Each run's change on each task, and the mean over the old tasks."""
    comparison = report.comparison
    measures = [measure for measure in comparison.measures if measure not in comparison.reliability]
    rows = []
    for run, outcomes in comparison.by_run:
        if any(measure.name in outcomes for measure in measures):
            row = _run_cells(report, run)
            row |= {_change_title(one): _change_cell(outcomes.get(one.name)) for one in measures}
            mean = average(comparison, outcomes)
            rows.append(row | {title: _shown(mean, report.old, sign=True) for title in _mean_titles(comparison)})
    shown = [value for row in rows for value in map(str, row.values())]
    note = f"Tuned minus pretrained{', [95% intervals] over the same documents' * any('[' in each for each in shown)}."
    if any(each.endswith("*") for each in shown):
        note += " * differs from 0: p < 0.05, Holm's correction for the number of the run's tasks."
    return Table("Changes by run", rows, note)


def tests_table(report: Report) -> Table:
    """Every change with its standard error and p values."""
    rows = []
    for run, outcomes in report.comparison.by_run:
        for measure in report.comparison.measures:
            one = outcomes.get(measure.name)
            if one is None or one.delta is None:
                continue
            error = one.delta.times(measure.scale).standard_error
            cells = {
                "task": measure.name,
                "pretrained": _shown(one.base, measure),
                "tuned": _shown(one.score, measure),
                "change": _shown(one.delta, measure, sign=True),
                "SE": number(error, measure.places + 1),
                "p": _p_value(one.p_value),
                "p, Holm": _p_value(one.p_holm),
                "test": _text(one.test),
            }
            rows.append(_run_cells(report, run) | cells)
    # Of probes and losses none may have them.
    empty = [title for title in ("SE", "p", "p, Holm", "test") if all(row[title] in ("", NONE) for row in rows)]
    rows = [{title: cell for title, cell in row.items() if title not in empty} for row in rows]
    return Table(
        "Every change" if "p" in empty else "Every change, with its tests",
        rows,
        "Scores in percent, changes in points. Losses and divergences are in nats per token where no other unit is named, the natural logarithm's unit: a token of probability one half has a loss of "
        "0.69 nats. They, and Brier's error, are better when lower.",
        text_columns=("task", "test"),
    )


def tasks_table(report: Report) -> Table:
    """What each task can resolve: documents, half-width, chance, and the pretrained model's score."""
    rows = []
    for measure in report.comparison.measures:
        found = [one[measure.name] for one in report.comparison.outcomes if measure.name in one]
        if not found:
            continue
        one = max(found, key=lambda outcome: outcome.n or 0)
        base = next((outcome.base for outcome in found if outcome.base is not None), None)
        width = None if one.n_clusters is None or measure.unit != POINTS else 100 * half_width(0.5, one.n_clusters)
        rows.append(
            {
                "task": measure.title,
                "role": measure.role,
                "metric": measure.metric,
                "from": measure.source,
                "documents": NONE if one.n is None else f"{one.n:,}" + (" (few)" if one.n < FEW_DOCUMENTS else ""),
                "half-width": NONE if width is None else f"±{width:.1f}",
                "chance": NONE if measure.chance is None else number(100 * measure.chance, 1),
                "pretrained": _shown(base, measure),
            }
        )
    notes = {
        "\N{PLUS-MINUS SIGN}": "Half-width: how far chance may move a score of 50% either way, in points (half of its 95% interval; losses have none). Between models "
        "that answered different documents a smaller difference means nothing.",
        "(few)": "(few): under 100, so intervals are rough.",
        "(at chance)": "(at chance): the pretrained model's interval is not above chance, so there is nothing to forget.",
    }
    shown = " ".join(str(cell) for row in rows for cell in row.values())
    note = " ".join(text for mark, text in notes.items() if mark in shown)
    return Table("Tasks", rows, note, text_columns=("role", "metric", "from"))


def skills_table(models: Mapping[str, Sequence[Skill]]) -> Table:
    """What each model forgot of each skill, and its accuracies."""
    titles = ("KL, nats per token", "prompts", "right before, %", "after, %", "change, points", "questions")
    rows = []
    for label, skills in models.items():
        for skill, *cells in skill_changes.table(skills)[1:]:
            shown = (NONE if cell in ("", "-") else cell.replace("-", MINUS) for cell in cells)
            rows.append({"run": label, "skill": skill, **dict(zip(titles, shown, strict=True))})
    return Table("By skill", rows, "[95% intervals.]", text_columns=("skill",))


def reliability_table(report: Report) -> Table:
    """Each run's scores on the reliability tasks, with the calibration error (ECE) of stated confidences."""
    comparison, measures = report.comparison, report.comparison.reliability
    titles = {
        one.name: f"{one.name}, {one.metric}{'' if one.is_higher_better else ' (lower is better)'}" for one in measures
    }
    every = [one for outcomes in comparison.outcomes for one in outcomes.values()]
    found = [[outcomes[one.name] for one in measures if one.name in outcomes] for outcomes in comparison.outcomes]
    bases = {one.measure.name: one.base for one in every if one.base}
    rows = [
        {"run": "pretrained", "seed": "", **{titles[one.name]: _shown(bases.get(one.name), one) for one in measures}}
    ]
    errors = [_calibration_cell(one.base_samples for those in found for one in those)]
    for (run, outcomes), those in zip(comparison.by_run, found, strict=True):
        if those:
            cells = {title: _score_and_change(outcomes.get(name)) for name, title in titles.items()}
            rows.append(_run_cells(report, run) | cells)
            errors.append(_calibration_cell(one.samples for one in those))
    if any(stated_confidences(one.samples)[0] for one in every):
        rows = [row | {"ECE": error} for row, error in zip(rows, errors, strict=True)]
    return Table(
        "Reliability",
        rows,
        "Score in percent, then its change in points; Brier's error and the expected calibration error (ECE, ten bins) x 100, over answers with a stated "
        "confidence. * as above.",
    )


def _score_and_change(one: Outcome | None) -> str:
    if one is None:
        return NONE
    score = number(one.measure.scale * one.score.value, one.measure.places)
    return score if one.delta is None else f"{score}, {_change_cell(one)}"


def _calibration_cell(samples: Iterable[Sequence[Sample]]) -> str:
    """Of the first samples that state confidences."""
    errors = (expected_calibration_error(*stated_confidences(one)) for one in samples)
    return next((number(100 * one, 1) for one in errors if one is not None), NONE)


def runs_table(report: Report) -> Table:
    """Where each run stands."""
    rows = []
    for run, outcomes in report.comparison.by_run:
        steps, epochs, share = run.steps, run.config.get("epochs"), run_files.capped_share(run.metrics)
        probes = [one.step for one in outcomes.values() if one.step is not None]
        cells = {
            "batch": _text(run.values.get(BATCH_SIZE)),
            "steps": str(steps[-1]["step"]) if steps else NONE,
            "epochs": NONE if epochs is None else f"{run.finished_epochs} of {epochs}",
            "best epoch": NONE if run.best_epoch is None else str(run.best_epoch + 1),
            "probes at step": str(probes[0]) if probes else NONE,
            "evaluated": ", ".join(sorted(run.results)) or "none",
            "at its cap": NONE if share is None else f"{share:.0%} of steps",
            "status": run.status or NONE,
            "folder": str(run.folder),
        }
        rows.append(_run_cells(report, run) | cells)
    return Table("Runs", rows, text_columns=("evaluated", "status", "folder"))


def paper_table(report: Report, paper: Mapping[str, Mapping[str, float]]) -> Table:
    """The paper's numbers above those of each setting of the same method. All tasks are evaluated ones in points.

    Args:
        paper: method to metric to value.
    """
    comparison, base, names = report.comparison, report.trade_off.base, report.names
    reliability = [
        one for one in comparison.reliability if any(METRICS.get(one.name, one.name) in row for row in paper.values())
    ]
    at_chance = [one for one in comparison.other_old if one.is_at_chance]
    columns = [*comparison.old, *at_chance, *reliability]
    metrics = [METRICS.get(one.name, one.name) for one in columns]
    rows: list[Row] = []

    def add(setting: str, place: str, score: float | None, changes: Iterable[float | None]) -> None:
        cells = [setting, place, number(score, 1), *(number(one, 1, sign=True) for one in changes)]
        titles = ("setting", "from", f"{comparison.new.name if comparison.new else 'new task'}, %", *metrics)
        rows.append(dict(zip((*titles, "mean of old tasks"), cells, strict=True)))

    labels = {run.label for run in comparison.runs}
    points = points_by_method(report.trade_off)
    for method in ["base", *names.styles]:
        if method in paper and method not in labels:
            label = "pretrained" if method == "base" else names.styles[method].label
            values = paper[method]
            add(label, "paper", values.get("task"), [values.get(key) for key in (*metrics, "avg_delta")])
        if method == "base" and base is not None:
            add("pretrained", "here", base.new.value, [0.0] * (len(columns) + 1))
        for point in points.get(method, []):
            norm = f"clip_grad_norm {point.setting.values.get('clip_grad_norm')}"
            if method == "sft" and norm in paper:
                changed = [paper[norm].get(key) for key in (*metrics, "avg_delta")]
                add(f"{names.styles[method].label}, {norm}", "paper", paper[norm]["task"], changed)
            members = [comparison.outcomes[run] for run in point.setting.runs if comparison.is_complete(run)]
            changes: list[float | None] = []
            for measure in columns:
                deltas = [one.delta.value for run in members if (one := run.get(measure.name)) and one.delta]
                changes.append(100 * statistics.fmean(deltas) if deltas else None)
            add(names.of(point.setting), "here", point.new.value, [*changes, point.old.value])
    without = f" The mean measured here is without {', '.join(one.name for one in at_chance)}, at chance."
    return Table(
        "The paper's numbers and those measured here",
        rows,
        "New-task score in percent, changes in points. The paper's are of its tables, each method at its own learning rate."
        + (without if at_chance else ""),
        text_columns=("from",),
    )


def summary_csv(comparison: Comparison) -> str:
    """A row for each run and task, and one for the mean of its old tasks; fractions and nats, unrounded."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run, outcomes in comparison.by_run:
        start = {
            "run": run.folder,
            "method": run.method,
            "learning_rate": run.learning_rate,
            "batch_size": run.values.get(BATCH_SIZE),
            "seed": run.seed,
        }
        for name, one in outcomes.items():
            suite = comparison.bases.get(one.measure.source)
            base = suite and suite.tasks.get(name)
            row = start | {
                "task": name,
                "accuracy": one.others.get("accuracy"),
                "base_accuracy": base and base.others.get("accuracy"),
                "score": one.score.value,
                "score_low": one.score.low,
                "score_high": one.score.high,
                "base_score": None if one.base is None else one.base.value,
                **{key: getattr(one.measure, key) for key in ("role", "source", "metric", "unit")},
                **{key: getattr(one, key) for key in ("n", "p_value", "p_holm", "test", "step")},
            }
            writer.writerow(_as_text(row | _delta_columns(one.delta)))
        mean = average(comparison, outcomes)
        if mean is not None:
            sources = {one.source for one in comparison.old}
            row = start | {"task": "mean of old tasks", "role": OLD, "unit": comparison.old[0].unit}
            row["source"] = sources.pop() if len(sources) == 1 else ""
            writer.writerow(_as_text(row | _delta_columns(mean)))
    return stream.getvalue()


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A spreadsheet takes a name that begins with one of these for a formula, which a quotation mark before it prevents."""
    starts = ("=", "+", "-", "@", "\t", "\r")
    texts = {key: printable(str(value)) for key, value in row.items() if isinstance(value, (str, os.PathLike))}
    return row | {key: f"'{text}" if text.startswith(starts) else text for key, text in texts.items()}


def _delta_columns(one: Estimate | None) -> dict[str, float | None]:
    if one is None:
        return {}
    return {"delta": one.value, "standard_error": one.standard_error, "delta_low": one.low, "delta_high": one.high}
