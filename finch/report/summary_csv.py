"""summary.csv: a row for each run and task."""

from __future__ import annotations

import csv
import io

from finch.evaluation.results import OLD
from finch.report.measures import Comparison
from finch.report.runs import BATCH_SIZE
from finch.report.tables import average

COLUMNS = (
    *("run", "method", "learning_rate", "batch_size", "seed", "task", "role", "source", "metric", "n"),
    *("score", "score_low", "score_high", "base_score", "delta", "standard_error", "delta_low", "delta_high"),
    *("p_value", "p_holm", "test", "step", "unit"),
)


def summary_csv(comparison: Comparison) -> str:
    """A row for each run and task, and one for the mean of its old tasks; fractions and nats, unrounded."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, run in enumerate(comparison.runs):
        start = [run.folder, run.method, run.learning_rate, run.values.get(BATCH_SIZE), run.seed]
        for name, one in comparison.outcomes[number].items():
            measure, delta = one.measure, one.delta
            row = [
                name,
                measure.role,
                measure.source,
                measure.metric,
                one.n,
                one.score.value,
                one.score.low,
                one.score.high,
                None if one.base is None else one.base.value,
                *((None,) * 4 if delta is None else (delta.value, delta.standard_error, delta.low, delta.high)),
                None if one.paired is None else one.paired.p_value,
                one.p_holm,
                None if one.paired is None else one.paired.test,
                one.step,
                measure.unit,
            ]
            writer.writerow([*start, *row])
        mean = average(comparison, number)
        if mean is not None:
            source = comparison.old[0].source if len({one.source for one in comparison.old}) == 1 else ""
            numbers = [mean.value, mean.standard_error, mean.low, mean.high]
            unit = comparison.old[0].unit
            writer.writerow(
                [*start, "mean of old tasks", OLD, source, "", *[None] * 5, *numbers, None, None, None, None, unit]
            )
    return stream.getvalue()
