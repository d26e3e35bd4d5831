"""The table of the reliability tasks, and the calibration of stated confidences."""

from __future__ import annotations

from collections.abc import Sequence

from finch.evaluation.results import Sample
from finch.evaluation.statistics import expected_calibration_error
from finch.evaluation.tasks.confidence import stated_confidences
from finch.report.formatting import NONE, digits, estimate, number
from finch.report.measures import Comparison, Outcome
from finch.report.selection import Measure
from finch.report.tables import LONG, Names, Table, change_cell, seed_cell


def reliability_table(comparison: Comparison, names: Names) -> Table:
    """Each run's scores on the reliability tasks, with the calibration error of stated confidences."""
    measures = list(comparison.reliability)
    has_confidences = any(
        stated_confidences(one.samples)[0] for outcomes in comparison.outcomes for one in outcomes.values()
    )
    rows = []
    base_cells: dict[str, tuple[str, str]] = {}
    for position, run in enumerate(comparison.runs):
        outcomes = comparison.outcomes[position]
        present = {measure.name: outcomes[measure.name] for measure in measures if measure.name in outcomes}
        if not present:
            continue
        for name, one in present.items():
            base_cells.setdefault(
                name,
                (
                    estimate(one.base, digits(one.measure.unit), scale=one.measure.scale),
                    calibration_cell(one.base_samples),
                ),
            )
        cells = [change_score_cell(present.get(measure.name), measure) for measure in measures]
        error = next(
            (calibration_cell(one.samples) for one in present.values() if stated_confidences(one.samples)[0]), NONE
        )
        rows.append([names.run(run), seed_cell(run), *cells, *([error] if has_confidences else [])])
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


def change_score_cell(one: Outcome | None, measure: Measure) -> str:
    if one is None:
        return NONE
    score = number(measure.scale * one.score.value, digits(measure.unit))
    return score if one.delta is None else f"{score}, {change_cell(one, measure)}"


def calibration_cell(samples: Sequence[Sample]) -> str:
    error = expected_calibration_error(*stated_confidences(samples))
    return NONE if error is None else number(100 * error, 1)
