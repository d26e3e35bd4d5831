"""The report's tables, as rows of text, and summary.csv: how numbers are written, and what settings and runs are called."""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finch.base.log import printable
from finch.evaluation.results import OLD, POINTS, Sample
from finch.evaluation.statistics import Z, expected_calibration_error, half_width
from finch.evaluation.tasks.confidence import stated_confidences
from finch.study.report.front import FOLDER, Front, Setting, TradeOff, on_front, points_by_method
from finch.study.report.measures import Comparison, Estimate, Outcome
from finch.study.report.paper import METRICS
from finch.study.report.runs import BATCH_SIZE, Run
from finch.study.report.selection import Measure
from finch.study.sweep.grid import LR
from finch.training.style import Style

MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
SIGNIFICANT = 0.05
LONG = 24
"""Rows of a table by run from which on it is folded."""
FEW_DOCUMENTS = 100
CSV_COLUMNS = (
    *("run", "method", "learning_rate", "batch_size", "seed", "task", "role", "source", "metric", "n"),
    *("score", "score_low", "score_high", "base_score", "delta", "standard_error", "delta_low", "delta_high"),
    *("p_value", "p_holm", "test", "step", "unit"),
)


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        text_columns: positions of columns that are words; the others are numbers, aligned to the right.
        is_long: folded on the page.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: Sequence[int] = (0,)
    is_long: bool = False


@dataclass(frozen=True)
class Names:
    """The names of settings and runs: the method, the learning rate, and the values that differ between them."""

    styles: Mapping[str, Style]
    varying: Sequence[str]

    @property
    def labels(self) -> list[str]:
        """The methods'."""
        return [style.label for style in self.styles.values()]

    def setting(self, setting: Setting) -> str:
        return ", ".join([self.styles[setting.method].label, *self._values(setting.values)])

    def run(self, run: Run) -> str:
        return ", ".join([self.styles[run.method].label, *self._values(run.values)])

    def _values(self, values: Mapping[str, object]) -> list[str]:
        texts = []
        for key in (LR, *self.varying):
            value = values.get(key)
            if value is None:
                continue
            if key == LR and isinstance(value, (int, float)):
                texts.append(f"lr {rate(float(value))}")
            else:
                texts.append(str(value) if key == FOLDER else f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        return texts


def make_names(settings: Sequence[Setting], styles: Mapping[str, Style]) -> Names:
    keys = {key: None for setting in settings for key in setting.values if key != LR}
    values = {key: {str(one.values[key]) for one in settings if key in one.values} for key in keys}
    return Names(styles, [key for key in keys if len(values[key]) > 1 or key == FOLDER])


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


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def rate(value: float) -> str:
    """A learning rate: ``2e-5``."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


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


def _shown(one: Estimate | None, measure: Measure, *, sign: bool = False) -> str:
    """An outcome's estimate in the unit that is shown."""
    return NONE if one is None else estimate(one.times(measure.scale), measure.places, sign=sign)


def _turned(one: Estimate, measure: Measure, *, sign: bool = False) -> str:
    """An estimate of the trade-off, where more is better, in the measure's own direction."""
    return estimate(one.times(measure.sign), measure.places, sign=sign)


def _change_cell(one: Outcome | None) -> str:
    if one is None or one.delta is None:
        return NONE
    star = "*" if one.p_holm is not None and one.p_holm < SIGNIFICANT else ""
    return _shown(one.delta, one.measure, sign=True) + star


def _mean_title(comparison: Comparison) -> list[str]:
    """Of the column with the mean over the trade-off's old tasks, where there are several."""
    names = ", ".join(one.name for one in comparison.old) if comparison.other_old else "old tasks"
    return [f"mean of {names}"] if len(comparison.old) > 1 else []


def _intervals_text(trade_off: TradeOff) -> str:
    return f", [95% intervals over {trade_off.drawn}]" if trade_off.has_intervals else ""


def settings_table(trade_off: TradeOff, names: Names, new: Measure, old: Sequence[Measure]) -> Table:
    """Each setting's place in the trade-off: mean over seeds, interval, range, and whether no other setting beats it."""
    front = on_front(trade_off.points)
    rows = [
        [
            names.setting(point.setting),
            _turned(point.new, new),
            _turned(point.old, old[0], sign=True),
            "yes" if point in front else "",
            str(len(point.runs)),
            _range([new.sign * one for one, _ in point.runs], new.places),
            _range([old[0].sign * other for _, other in point.runs], old[0].places, sign=True),
        ]
        for point in trade_off.points
    ]
    if trade_off.base is not None:
        rows.append(["pretrained", _turned(trade_off.base.new, new), number(0, old[0].places), "", "", "", ""])
    return Table(
        "Settings",
        [
            *("setting", f"{new.name}, {new.score_unit}", f"old tasks, {old[0].change_unit}", "not dominated"),
            *("seeds", f"{new.name}: range", "old tasks: range"),
        ],
        rows,
        f"Means over seeds{_intervals_text(trade_off)}. Old tasks: "
        + ("unweighted mean of the changes of " if len(old) > 1 else "the change of ")
        + ", ".join(one.name for one in old)
        + ".",
    )


def _range(values: Sequence[float], places: int, *, sign: bool = False) -> str:
    if len(values) < 2:
        return ""
    return f"{number(min(values), places, sign=sign)} to {number(max(values), places, sign=sign)}"


def front_tables(front: Front, names: Names, trade_off: TradeOff, new: Measure, old: Measure) -> list[Table]:
    """Each method's change of the old tasks at each common score, and its difference from the reference's, of two methods or more."""
    points = points_by_method(trade_off)
    changes, differences = [], []
    for method, values in front.methods.items():
        label = names.styles[method].label
        cells = [
            f"reaches {equal_score(front.highest[method], new)}"
            if value.change is None
            else _turned(value.change, old, sign=True) + (" †" if value.is_extrapolated else "")
            for value in values
        ]
        num_runs = sum(len(point.runs) for point in points[method])
        changes.append([label, *cells, str(len(points[method])), str(num_runs)])
        if method != front.reference:
            cells = [NONE if one.difference is None else _turned(one.difference, old, sign=True) for one in values]
            differences.append([label, *cells])
    columns = ["method", *(f"at {equal_score(score, new)}" for score in front.scores)]
    change = Table(
        f"Change of the old tasks, {old.change_unit}, at equal {new.name}",
        [*columns, "settings", "runs"],
        changes,
        (f"[95% intervals of a bootstrap over {trade_off.drawn}.] " if trade_off.has_intervals else "")
        + "† is a guess, on a straight line from the pretrained model: the method has no setting that learned so little.",
    )
    difference = Table(
        f"Difference from {names.styles[front.reference].label}, {old.change_unit}",
        columns,
        differences,
        f"{'Above' if old.sign > 0 else 'Below'} 0: forgets less. Both methods are compared on the same documents and seeds. An interval that "
        "includes 0 shows no difference.",
    )
    return [change, difference] if differences else [change]


def old_tasks_table(trade_off: TradeOff, names: Names, comparison: Comparison) -> Table:
    """Each setting's change on each old task, mean over seeds; on those outside the trade-off where all its runs have one."""
    old, others, points = comparison.old, comparison.other_old, trade_off.points
    columns = [*old, *(one for one in others if all(one.name in point.tasks for point in points))]
    rows = []
    for point in points:
        cells = [_turned(point.tasks[measure.name], measure, sign=True) for measure in columns]
        if len(old) > 1:
            cells.append(_turned(point.old, old[0], sign=True))
        rows.append([names.setting(point.setting), *cells])
    titles = [f"{one.title}, {one.change_unit}" for one in columns]
    return Table(
        "Old tasks by setting",
        ["setting", *titles, *_mean_title(comparison)],
        rows,
        f"Tuned minus pretrained, means over seeds{_intervals_text(trade_off)}.",
    )


def changes_table(comparison: Comparison, names: Names) -> Table:
    """Each run's change on each task, and the mean over the old tasks."""
    measures = [measure for measure in comparison.measures if measure not in comparison.reliability]
    rows = []
    for run, outcomes in zip(comparison.runs, comparison.outcomes, strict=True):
        if not any(measure.name in outcomes for measure in measures):
            continue
        cells = [_change_cell(outcomes.get(measure.name)) for measure in measures]
        if len(comparison.old) > 1:
            cells.append(_shown(average(comparison, outcomes), comparison.old[0], sign=True))
        rows.append([names.run(run), _text(run.seed), *cells])
    titles = [f"{one.title}, {one.change_unit}" for one in measures]
    return Table(
        "Changes by run",
        ["run", "seed", *titles, *_mean_title(comparison)],
        rows,
        "Tuned minus pretrained on the same documents, [95% intervals]. * differs from 0: p < 0.05, Holm's correction for the number of the run's tasks.",
        is_long=len(rows) > LONG,
    )


def tests_table(comparison: Comparison, names: Names) -> Table:
    """Every change with its standard error and p values."""
    rows = []
    for run, outcomes in zip(comparison.runs, comparison.outcomes, strict=True):
        for measure in comparison.measures:
            one = outcomes.get(measure.name)
            if one is None or one.delta is None:
                continue
            error = one.delta.standard_error
            rows.append(
                [
                    names.run(run),
                    _text(run.seed),
                    measure.name,
                    _shown(one.base, measure),
                    _shown(one.score, measure),
                    _shown(one.delta, measure, sign=True),
                    number(None if error is None else measure.scale * error, measure.places + 1),
                    p_value(one.p_value),
                    p_value(one.p_holm),
                    _text(one.test),
                ]
            )
    return Table(
        "Every change, with its tests",
        ["run", "seed", "task", "pretrained", "tuned", "change", "SE", "p", "p, Holm", "test"],
        rows,
        "Scores in percent, changes in points. Losses and divergences are in nats per token, the natural logarithm's unit: a token of probability one half has a loss of "
        "0.69 nats. They, and Brier's error, are better when lower.",
        text_columns=(0, 2, 9),
        is_long=len(rows) > LONG,
    )


def tasks_table(comparison: Comparison) -> Table:
    """What each task can resolve: documents, half-width, chance, and the pretrained model's score."""
    rows = []
    for measure in comparison.measures:
        found = [one[measure.name] for one in comparison.outcomes if measure.name in one]
        if not found:
            continue
        one = max(found, key=lambda outcome: outcome.n or 0)
        base = next((outcome.base for outcome in found if outcome.base is not None), None)
        width = None if one.n_clusters is None or measure.unit != POINTS else 100 * half_width(0.5, one.n_clusters)
        rows.append(
            [
                measure.title,
                measure.role,
                measure.metric,
                measure.source,
                NONE if one.n is None else f"{one.n:,}" + (" (few)" if one.n < FEW_DOCUMENTS else ""),
                NONE if width is None else f"±{width:.1f}",
                NONE if measure.chance is None else number(100 * measure.chance, 1),
                _shown(base, measure),
            ]
        )
    return Table(
        "Tasks",
        ["task", "role", "metric", "from", "documents", "half-width", "chance", "pretrained"],
        rows,
        "How far chance may move a score of 50% either way, in points (half of its 95% interval; losses have none). Between models that answered different "
        "documents a smaller difference means nothing. (few): under 100, so intervals are rough. (at chance): the pretrained model's interval is not above "
        "chance, so there is nothing to forget.",
        text_columns=(0, 1, 2, 3),
    )


def reliability_table(comparison: Comparison, names: Names) -> Table:
    """Each run's scores on the reliability tasks, with the calibration error (ECE) of stated confidences."""
    measures = comparison.reliability
    has_confidences = any(
        stated_confidences(one.samples)[0] for outcomes in comparison.outcomes for one in outcomes.values()
    )
    bases = {one.measure.name: one.base for outcomes in comparison.outcomes for one in outcomes.values() if one.base}
    found = [[outcomes[one.name] for one in measures if one.name in outcomes] for outcomes in comparison.outcomes]
    base_error = _calibration_cell(one.base_samples for those in found for one in those)
    rows = [["pretrained", "", *(_shown(bases.get(one.name), one) for one in measures), base_error]]
    for run, outcomes, those in zip(comparison.runs, comparison.outcomes, found, strict=True):
        if those:
            cells = [_score_and_change(outcomes.get(one.name)) for one in measures]
            rows.append([names.run(run), _text(run.seed), *cells, _calibration_cell(one.samples for one in those)])
    titles = [f"{one.name}, {one.metric}{'' if one.is_higher_better else ' (lower is better)'}" for one in measures]
    return Table(
        "Reliability",
        ["run", "seed", *titles, *(["ECE"] if has_confidences else [])],
        rows if has_confidences else [row[:-1] for row in rows],
        "Score in percent, then its change in points; Brier's error and the expected calibration error (ECE, ten bins) x 100, over answers with a stated "
        "confidence. * as above.",
        is_long=len(rows) > LONG,
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


def runs_table(comparison: Comparison, names: Names) -> Table:
    """Where each run stands."""
    rows = []
    for run, outcomes in zip(comparison.runs, comparison.outcomes, strict=True):
        steps, epochs = run.steps, run.config.get("epochs")
        probes = [one.step for one in outcomes.values() if one.step is not None]
        rows.append(
            [
                names.run(run),
                _text(run.seed),
                _text(run.values.get(BATCH_SIZE)),
                str(steps[-1]["step"]) if steps else NONE,
                NONE if epochs is None else f"{run.finished_epochs} of {epochs}",
                NONE if run.best_epoch is None else str(run.best_epoch + 1),
                str(probes[0]) if probes else NONE,
                ", ".join(sorted(run.results)) or "none",
                run.status or NONE,
                str(run.folder),
            ]
        )
    return Table(
        "Runs",
        ["run", "seed", "batch", "steps", "epochs", "best epoch", "probes at step", "evaluated", "status", "folder"],
        rows,
        text_columns=(0, 7, 8, 9),
        is_long=len(rows) > LONG,
    )


def paper_table(
    comparison: Comparison, trade_off: TradeOff, names: Names, paper: Mapping[str, Mapping[str, float]]
) -> Table:
    """The paper's numbers above those of each setting of the same method. All tasks are evaluated ones in points.

    Args:
        paper: method to metric to value.
    """
    new = comparison.new
    reliability = [
        one for one in comparison.reliability if any(METRICS.get(one.name, one.name) in row for row in paper.values())
    ]
    at_chance = [one for one in comparison.other_old if one.is_at_chance]
    columns = [*comparison.old, *at_chance, *reliability]
    titles = [METRICS.get(one.name, one.name) for one in columns]
    labels = {run.label for run in comparison.runs}
    points = points_by_method(trade_off)
    rows = []
    for method in ["base", *names.styles]:
        if method in paper and method not in labels:
            values = [paper[method].get(key) for key in ("task", *titles, "avg_delta")]
            label = "pretrained" if method == "base" else names.styles[method].label
            rows.append([label, "paper", *(number(one, 1, sign=index > 0) for index, one in enumerate(values))])
        if method == "base" and trade_off.base is not None:
            zeros = [number(0, 1)] * (len(columns) + 1)
            rows.append(["pretrained", "here", number(trade_off.base.new.value, 1), *zeros])
        for point in points.get(method, []):
            members = [comparison.outcomes[run] for run in point.setting.runs if comparison.is_complete(run)]
            cells = []
            for measure in columns:
                deltas = [one.delta.value for run in members if (one := run.get(measure.name)) and one.delta]
                cells.append(number(100 * statistics.fmean(deltas), 1, sign=True) if deltas else NONE)
            place = number(point.new.value, 1), *cells, number(point.old.value, 1, sign=True)
            rows.append([names.setting(point.setting), "here", *place])
    without = f" The mean measured here is without {', '.join(one.name for one in at_chance)}, at chance."
    return Table(
        "The paper's numbers and those measured here",
        ["setting", "from", f"{new.name if new else 'new task'}, %", *titles, "mean of old tasks"],
        rows,
        "New-task score in percent, changes in points. The paper's are of its tables, each method at its own learning rate."
        + (without if at_chance else ""),
        text_columns=(0, 1),
    )


def summary_csv(comparison: Comparison) -> str:
    """A row for each run and task, and one for the mean of its old tasks; fractions and nats, unrounded."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run, outcomes in zip(comparison.runs, comparison.outcomes, strict=True):
        start = {
            "run": run.folder,
            "method": run.method,
            "learning_rate": run.learning_rate,
            "batch_size": run.values.get(BATCH_SIZE),
            "seed": run.seed,
        }
        for name, one in outcomes.items():
            row = start | {
                "task": name,
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
