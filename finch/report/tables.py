"""What the report's tables are made of: rows of text, the names of settings and runs, and cells that several tables have."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from finch.evaluation.results import POINTS
from finch.evaluation.statistics import average_delta
from finch.report.figures.style import Style
from finch.report.formatting import NONE, digits, estimate, rate
from finch.report.measures import Comparison, Estimate, Outcome, finite
from finch.report.runs import LEARNING_RATE, Run
from finch.report.selection import Measure
from finch.report.settings import FOLDER, Setting

SIGNIFICANT = 0.05
LONG = 24
"""Rows of a table by run from which on it is folded."""


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
                texts.append(str(value) if key == FOLDER else f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        return texts


def make_names(settings: Sequence[Setting], styles: Mapping[str, Style]) -> Names:
    keys = {key: None for setting in settings for key in setting.values if key != LEARNING_RATE}
    values = {key: {str(one.values[key]) for one in settings if key in one.values} for key in keys}
    varying = [key for key in keys if len(values[key]) > 1 or key == FOLDER]
    return Names(styles, varying)


def units(measures: Sequence[Measure], *, is_change: bool) -> str:
    """The unit of several measures, which all have the same one."""
    if not measures or measures[0].unit == POINTS:
        return "points" if is_change else "%"
    return "nats a token"


def mean_title(old: Sequence[Measure], others: Sequence[Measure]) -> str:
    """Of a column with the mean over the trade-off's old tasks."""
    return f"mean of {', '.join(one.name for one in old)}" if others else "mean of old tasks"


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


def change_cell(one: Outcome | None, measure: Measure) -> str:
    if one is None or one.delta is None:
        return NONE
    star = "*" if one.p_holm is not None and one.p_holm < SIGNIFICANT else ""
    return estimate(one.delta, digits(measure.unit), scale=measure.scale, sign=True) + star


def shown_sign(measure: Measure) -> int:
    """From a value where more is better to the value itself."""
    return 1 if measure.is_higher_better else -1


def flip(one: Estimate, sign: int) -> Estimate:
    """The estimate times 1 or -1."""
    if sign > 0 or one.low is None or one.high is None:
        return Estimate(sign * one.value, one.standard_error, one.low, one.high)
    return Estimate(-one.value, one.standard_error, -one.high, -one.low)


def seed_cell(run: Run) -> str:
    return NONE if run.seed is None else str(run.seed)
