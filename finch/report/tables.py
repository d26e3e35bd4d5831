"""The report's tables, as text cells: the same ones in Markdown and HTML."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from finch.evaluation.results import NEW, Sample
from finch.evaluation.statistics import average_delta, expected_calibration_error, half_width
from finch.report.figures.style import Style
from finch.report.formatting import NONE, digits, estimate, number, p_value, rate
from finch.report.front import Front, non_dominated
from finch.report.measures import POINTS, Comparison, Estimate, Measure, Outcome, finite
from finch.report.paper.numbers import METRICS
from finch.report.runs import BATCH_SIZE, LEARNING_RATE, Run
from finch.report.settings import Setting, TradeOff

SIGNIFICANT = 0.05
LONG = 24
"""Rows of a table by run from which on it is folded."""


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        labels: how many columns at the left name the row; the others are numbers, aligned to the right.
        is_long: folded on the page.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    labels: int = 1
    is_long: bool = False


@dataclass(frozen=True)
class Names:
    """What settings and runs are called: no more than what tells them apart."""

    styles: Mapping[str, Style]
    varying: Sequence[str]

    def setting(self, setting: Setting) -> str:
        return ", ".join([self.styles[setting.method].label, *self._values(setting.values)])

    def run(self, run: Run) -> str:
        return ", ".join([self.styles[run.method].label, *self._values(run.values)])

    def _values(self, values: Mapping[str, object]) -> list[str]:
        texts = []
        for key in (LEARNING_RATE, *self.varying):
            value = values.get(key)
            if value is None:
                continue
            if key == LEARNING_RATE and isinstance(value, (int, float)):
                texts.append(f"lr {rate(float(value))}")
            else:
                texts.append(str(value) if key == "folder" else f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        return texts


def make_names(settings: Sequence[Setting], styles: Mapping[str, Style]) -> Names:
    keys = {key: None for setting in settings for key in setting.values if key != LEARNING_RATE}
    varying = [key for key in keys if len({str(setting.values.get(key)) for setting in settings}) > 1]
    return Names(styles, varying)


def units(measures: Sequence[Measure], *, is_change: bool) -> str:
    """The unit of several measures, which all have the same one."""
    if not measures or measures[0].unit == POINTS:
        return "points" if is_change else "%"
    return "nats a token"


def settings_table(trade_off: TradeOff, names: Names, new: Measure, old: Sequence[Measure]) -> Table:
    """Each setting's place in the trade-off: mean over seeds, interval, range, and whether no other setting beats it."""
    new_sign, old_sign = shown_sign(new), shown_sign(old[0])
    new_places, old_places = digits(new.unit), digits(old[0].unit)
    points = list(trade_off.points)
    front = set(non_dominated([one.new.value for one in points], [one.old.value for one in points]))
    rows = []
    for position, point in enumerate(points):
        assert point.setting is not None
        seeds = [(one, other) for index, one, other in trade_off.runs if index == position]
        rows.append(
            [
                names.setting(point.setting),
                str(len(seeds)),
                estimate(flip(point.new, new_sign), new_places),
                _range([new_sign * one for one, _ in seeds], new_places),
                estimate(flip(point.old, old_sign), old_places, sign=True),
                _range([old_sign * other for _, other in seeds], old_places, sign=True),
                "yes" if position in front else "",
            ]
        )
    if trade_off.base is not None:
        base = estimate(flip(trade_off.base.new, new_sign), new_places)
        rows.append(["pretrained", "", base, "", number(0, old_places), "", ""])
    return Table(
        "Settings",
        [
            "setting",
            "seeds",
            f"{new.name}, {units([new], is_change=False)}",
            "range",
            f"old tasks, {units(old, is_change=True)}",
            "range",
            "not dominated",
        ],
        rows,
        "Means over seeds"
        + (", [95% intervals over documents and seeds]" if trade_off.has_intervals else "")
        + ". Old tasks: unweighted mean of the changes of "
        + ", ".join(one.name for one in old)
        + ".",
    )


def front_table(front: Front, names: Names, trade_off: TradeOff, new: Measure, old: Sequence[Measure]) -> Table:
    """A method's change of the old tasks at each common score."""
    sign, places = shown_sign(old[0]), digits(old[0].unit)
    rows = []
    for method, values in front.methods.items():
        cells = [
            f"reaches {_score(front.highest[method], new)}"
            if value.change is None
            else estimate(flip(value.change, sign), places, sign=True) + (" †" if value.is_extrapolated else "")
            for value in values
        ]
        points = [one for one in trade_off.points if one.setting is not None and one.setting.method == method]
        num_runs = sum(1 for index, _, _ in trade_off.runs if trade_off.points[index] in points)
        rows.append([names.styles[method].label, str(len(points)), str(num_runs), *cells])
    return Table(
        f"Change of the old tasks, {units(old, is_change=True)}, at equal {new.name}",
        ["method", "settings", "runs", *(f"at {_score(score, new)}" for score in front.scores)],
        rows,
        "[95% intervals of a bootstrap over documents and seeds.] † between the pretrained model and the method's mildest setting, where a straight line "
        "is a guess.",
    )


def difference_table(front: Front, names: Names, new: Measure, old: Sequence[Measure]) -> Table | None:
    """Each method minus the reference at the same score; None without another method."""
    if front.reference is None or len(front.methods) < 2:
        return None
    sign, places = shown_sign(old[0]), digits(old[0].unit)
    rows = [
        [names.styles[method].label]
        + [
            NONE if one.difference is None else estimate(flip(one.difference, sign), places, sign=True)
            for one in values
        ]
        for method, values in front.methods.items()
        if method != front.reference
    ]
    better = "Above 0: forgets less" if sign > 0 else "Below 0: forgets less"
    return Table(
        f"Difference from {names.styles[front.reference].label}, {units(old, is_change=True)}",
        ["method", *(f"at {_score(score, new)}" for score in front.scores)],
        rows,
        f"{better}. Paired: the same documents and seeds are drawn for both. An interval that includes 0 shows no difference.",
    )


def old_tasks_table(trade_off: TradeOff, names: Names, old: Sequence[Measure]) -> Table:
    """Each setting's change on each old task, mean over seeds."""
    rows = []
    for point in trade_off.points:
        if point.setting is None:
            continue
        cells = [
            estimate(flip(point.tasks[measure.name], shown_sign(measure)), digits(measure.unit), sign=True)
            for measure in old
        ]
        mean = estimate(flip(point.old, shown_sign(old[0])), digits(old[0].unit), sign=True)
        rows.append([names.setting(point.setting), *cells, mean])
    return Table(
        "Old tasks by setting",
        ["setting", *(f"{one.name}, {units([one], is_change=True)}" for one in old), "mean"],
        rows,
        "Tuned minus pretrained, means over seeds"
        + (", [95% intervals over documents and seeds]." if trade_off.has_intervals else "."),
    )


def changes_table(comparison: Comparison, names: Names) -> Table:
    """Each run's change on each task, and the mean over the old tasks."""
    measures = [measure for measure in comparison.measures if measure.role == NEW or measure in comparison.old]
    rows = []
    for position, run in enumerate(comparison.runs):
        outcomes = comparison.outcomes[position]
        if not any(measure.name in outcomes for measure in measures):
            continue
        cells = [change_cell(outcomes.get(measure.name), measure) for measure in measures]
        rows.append(
            [names.run(run), NONE if run.seed is None else str(run.seed), *cells, average_cell(comparison, position)]
        )
    return Table(
        "Changes by run",
        ["run", "seed", *(f"{one.name}, {units([one], is_change=True)}" for one in measures), "mean of old tasks"],
        rows,
        "Tuned minus pretrained, paired by document, [95% intervals]. * differs from 0 after Holm's correction over the run's tasks (p < 0.05).",
        is_long=len(rows) > LONG,
    )


def tests_table(comparison: Comparison, names: Names) -> Table:
    """Every change with its standard error and p values."""
    rows = []
    for position, run in enumerate(comparison.runs):
        for measure in comparison.measures:
            one = comparison.outcomes[position].get(measure.name)
            if one is None or one.delta is None:
                continue
            places = digits(measure.unit)
            rows.append(
                [
                    names.run(run),
                    NONE if run.seed is None else str(run.seed),
                    measure.name,
                    estimate(one.base, places, scale=measure.scale),
                    estimate(one.score, places, scale=measure.scale),
                    estimate(one.delta, places, scale=measure.scale, sign=True),
                    number(None if (error := one.delta.standard_error) is None else measure.scale * error, places + 1),
                    p_value(None if one.paired is None else one.paired.p_value),
                    p_value(one.p_holm),
                    NONE if one.paired is None else one.paired.test,
                ]
            )
    return Table(
        "Every change, with its tests",
        ["run", "seed", "task", "pretrained", "tuned", "change", "SE", "p", "p, Holm", "test"],
        rows,
        "Scores in percent, changes in points; losses of probes in nats a token. Brier's error is lower when better.",
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
        width = None if one.n_clusters is None else 100 * half_width(0.5, one.n_clusters)
        rows.append(
            [
                measure.name,
                measure.role,
                measure.metric,
                "probe" if measure.is_probe else measure.source,
                NONE if one.n is None else f"{one.n:,}",
                NONE if width is None else f"±{width:.1f}",
                NONE if measure.chance is None else number(100 * measure.chance, 1),
                estimate(base, digits(measure.unit), scale=measure.scale),
            ]
        )
    return Table(
        "Tasks",
        ["task", "role", "metric", "from", "documents", "half-width", "chance", "pretrained"],
        rows,
        "Half-width of a 95% interval of one score at 50%, in points: unpaired differences smaller than this mean nothing.",
        labels=4,
    )


def reliability_table(comparison: Comparison, names: Names) -> Table:
    """Each run's scores on the reliability tasks, with the calibration error of stated confidences."""
    measures = list(comparison.reliability)
    has_confidences = any(confidences(one.samples)[0] for outcomes in comparison.outcomes for one in outcomes.values())
    rows = []
    base_cells: dict[str, tuple[str, str]] = {}
    for position, run in enumerate(comparison.runs):
        outcomes = comparison.outcomes[position]
        present = {measure.name: outcomes[measure.name] for measure in measures if measure.name in outcomes}
        if not present:
            continue
        for name, one in present.items():
            base_cells.setdefault(name, (estimate(one.base, 1, scale=100), calibration_cell(one.base_samples)))
        cells = [change_score_cell(present.get(measure.name), measure) for measure in measures]
        error = next((calibration_cell(one.samples) for one in present.values() if confidences(one.samples)[0]), NONE)
        rows.append(
            [names.run(run), NONE if run.seed is None else str(run.seed), *cells, *([error] if has_confidences else [])]
        )
    base_error = next((error for _, error in base_cells.values() if error != NONE), NONE)
    base_row = ["pretrained", "", *(base_cells.get(one.name, (NONE, NONE))[0] for one in measures)]
    rows.insert(0, [*base_row, *([base_error] if has_confidences else [])])
    return Table(
        "Reliability",
        [
            "run",
            "seed",
            *(f"{one.name}, {one.metric}{'' if one.is_higher_better else ' (lower is better)'}" for one in measures),
            *(["ECE"] if has_confidences else []),
        ],
        rows,
        "Score in percent, then its change in points; Brier's error and the expected calibration error (ECE, ten bins) x 100, over answers with a stated "
        "confidence. * as above.",
        is_long=len(rows) > LONG,
    )


def paper_table(
    comparison: Comparison, trade_off: TradeOff, names: Names, paper: Mapping[str, Mapping[str, float]]
) -> Table:
    """The paper's numbers above those of each setting of the same method."""
    new = comparison.new
    old = [measure for measure in comparison.old if not measure.is_probe]
    reliability = [
        one for one in comparison.reliability if any(METRICS.get(one.name, one.name) in row for row in paper.values())
    ]
    columns = [*old, *reliability]
    methods = {run.method for run in comparison.runs}
    rows = []
    for method in ["base", *(one for one in names.styles if one in methods)]:
        if method in paper:
            values = paper[method]
            label = "pretrained" if method == "base" else names.styles[method].label
            shown = [
                values.get("task"),
                *(values.get(METRICS.get(one.name, one.name)) for one in columns),
                values.get("avg_delta"),
            ]
            cells = [number(value, 1, sign=index > 0) for index, value in enumerate(shown)]
            rows.append([label, "paper", *cells])
        if method == "base":
            if trade_off.base is not None:
                rows.append(
                    ["pretrained", "here", number(trade_off.base.new.value, 1), *[number(0, 1)] * (len(columns) + 1)]
                )
            continue
        for point in trade_off.points:
            if point.setting is None or point.setting.method != method or new is None:
                continue
            members = [one for one in point.setting.runs if comparison.is_complete(one)]
            cells = []
            for measure in columns:
                deltas = [
                    one.delta.value
                    for run in members
                    if (one := comparison.outcomes[run].get(measure.name)) is not None and one.delta is not None
                ]
                cells.append(number(100 * statistics.fmean(deltas), 1, sign=True) if deltas else NONE)
            rows.append(
                [
                    names.setting(point.setting),
                    "here",
                    number(point.new.value, 1),
                    *cells,
                    number(point.old.value, 1, sign=True),
                ]
            )
    return Table(
        "The paper's numbers and those measured here",
        [
            "setting",
            "from",
            f"{new.name if new else 'new task'}, %",
            *(one.name for one in columns),
            "mean of old tasks",
        ],
        rows,
        "New-task score in percent, changes in points. The paper's are at each method's own learning rate, of one seed, from its tables.",
        labels=2,
    )


def runs_table(comparison: Comparison, names: Names) -> Table:
    """Where each run stands."""
    rows = []
    for position, run in enumerate(comparison.runs):
        steps = run.steps
        seen = sorted(run.results)
        probes = [one.step for one in comparison.outcomes[position].values() if one.step is not None]
        rows.append(
            [
                names.run(run),
                NONE if run.seed is None else str(run.seed),
                NONE if run.values.get(BATCH_SIZE) is None else str(run.values[BATCH_SIZE]),
                str(steps[-1]["step"]) if steps else NONE,
                epochs_text(run),
                NONE if run.best_epoch is None else str(run.best_epoch + 1),
                str(probes[0]) if probes else NONE,
                ", ".join(seen) or "none",
                run.status or NONE,
                str(run.folder),
            ]
        )
    return Table(
        "Runs",
        ["run", "seed", "batch", "steps", "epochs", "best epoch", "probes at step", "evaluated", "status", "folder"],
        rows,
        is_long=len(rows) > LONG,
    )


def epochs_text(run: Run) -> str:
    """Finished epochs of those planned."""
    epochs = run.config.get("epochs")
    if epochs is None:
        return NONE
    return f"{finished_epochs(run)} of {epochs}"


def finished_epochs(run: Run) -> int:
    return sum(1 for epoch in range(int(run.config.get("epochs") or 0)) if any(run.folder.glob(f"epoch_{epoch}*")))


def average(comparison: Comparison, run: int) -> Estimate | None:
    """The mean change of the old tasks, in the direction of the first one; None where one of them is missing."""
    if not comparison.old or not all(measure.name in comparison.outcomes[run] for measure in comparison.old):
        return None
    found = [comparison.outcomes[run][measure.name] for measure in comparison.old]
    signs = [shown_sign(measure) * shown_sign(comparison.old[0]) for measure in comparison.old]
    paired = [
        replace(one.paired, delta=sign * one.paired.delta) for one, sign in zip(found, signs, strict=True) if one.paired
    ]
    if len(paired) == len(found):
        mean = average_delta(paired)
        return Estimate(mean.delta, *map(finite, (mean.standard_error, mean.low, mean.high)))
    values = [sign * one.delta.value for one, sign in zip(found, signs, strict=True) if one.delta is not None]
    return Estimate(statistics.fmean(values)) if len(values) == len(found) else None


def average_cell(comparison: Comparison, run: int) -> str:
    one = average(comparison, run)
    if one is None:
        return NONE
    measure = comparison.old[0]
    return estimate(one, digits(measure.unit), scale=measure.scale, sign=True)


def change_cell(one: Outcome | None, measure: Measure) -> str:
    if one is None or one.delta is None:
        return NONE
    star = "*" if one.p_holm is not None and one.p_holm < SIGNIFICANT else ""
    return estimate(one.delta, digits(measure.unit), scale=measure.scale, sign=True) + star


def change_score_cell(one: Outcome | None, measure: Measure) -> str:
    if one is None:
        return NONE
    score = number(measure.scale * one.score.value, 1)
    return score if one.delta is None else f"{score}, {change_cell(one, measure)}"


def confidences(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Stated confidences in [0, 1] and whether the answers were right, of the responses that state both."""
    stated = [one for one in samples if one.get("confidence") is not None and one.get("is_parsed")]
    return [one["confidence"] / 100 for one in stated], [float(one["letter"] == one["answer"]) for one in stated]


def calibration_cell(samples: Sequence[Sample]) -> str:
    stated, correct = confidences(samples)
    error = expected_calibration_error(stated, correct)
    return NONE if error is None else number(100 * error, 1)


def shown_sign(measure: Measure) -> int:
    """From a value where more is better to the value itself."""
    return 1 if measure.is_higher_better else -1


def flip(one: Estimate, sign: int) -> Estimate:
    """The estimate times 1 or -1."""
    if sign > 0 or one.low is None or one.high is None:
        return Estimate(sign * one.value, one.standard_error, one.low, one.high)
    return Estimate(-one.value, one.standard_error, -one.high, -one.low)


def _score(value: float, measure: Measure) -> str:
    return number(shown_sign(measure) * value, digits(measure.unit)) + ("%" if measure.unit == POINTS else " nats")


def _range(values: Sequence[float], places: int, *, sign: bool = False) -> str:
    if len(values) < 2:
        return ""
    return f"{number(min(values), places, sign=sign)} to {number(max(values), places, sign=sign)}"
