"""Tables of the changes from the pretrained model: by run, with every test, and what each task can resolve."""

from __future__ import annotations

from finch.evaluation.results import POINTS
from finch.evaluation.statistics import half_width
from finch.report.formatting import NONE, digits, estimate, number, p_value
from finch.report.measures import Comparison
from finch.report.tables import LONG, Names, Table, average, change_cell, mean_title, seed_cell, units


def changes_table(comparison: Comparison, names: Names) -> Table:
    """Each run's change on each task, and the mean over the old tasks."""
    measures = [measure for measure in comparison.measures if measure not in comparison.reliability]
    has_mean = len(comparison.old) > 1
    rows = []
    for position, run in enumerate(comparison.runs):
        outcomes = comparison.outcomes[position]
        if not any(measure.name in outcomes for measure in measures):
            continue
        cells = [change_cell(outcomes.get(measure.name), measure) for measure in measures]
        mean = [average_cell(comparison, position)] if has_mean else []
        rows.append([names.run(run), seed_cell(run), *cells, *mean])
    return Table(
        "Changes by run",
        [
            "run",
            "seed",
            *(f"{one.name}, {units([one], is_change=True)}" for one in measures),
            *([mean_title(comparison.old, comparison.other_old)] if has_mean else []),
        ],
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
                    seed_cell(run),
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
        "Scores in percent, changes in points; losses and divergences in nats a token, which are lower when better, as Brier's error.",
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
        "Half-width of a 95% interval of one score at 50%, in points (losses have none): unpaired differences smaller than this mean nothing.",
        text_columns=(0, 1, 2, 3),
    )


def average_cell(comparison: Comparison, run: int) -> str:
    one = average(comparison, run)
    if one is None:
        return NONE
    measure = comparison.old[0]
    return estimate(one, digits(measure.unit), scale=measure.scale, sign=True)
