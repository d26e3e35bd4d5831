"""Tables of the trade-off: settings, the front at equal score, and the old tasks of each setting."""

from __future__ import annotations

from collections.abc import Sequence

from finch.evaluation.results import POINTS
from finch.report.formatting import NONE, digits, estimate, number
from finch.report.front import Front, non_dominated
from finch.report.selection import Measure
from finch.report.settings import TradeOff
from finch.report.tables import Names, Table, flip, mean_title, shown_sign, units


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
        + (f", [95% intervals over {trade_off.drawn}]" if trade_off.has_intervals else "")
        + (". Old tasks: unweighted mean of the changes of " if len(old) > 1 else ". Old tasks: the change of ")
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
        f"[95% intervals of a bootstrap over {trade_off.drawn}.] "
        * trade_off.has_intervals
        + "† between the pretrained model and the method's mildest setting, where a straight line "
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


def old_tasks_table(trade_off: TradeOff, names: Names, old: Sequence[Measure], others: Sequence[Measure]) -> Table:
    """Each setting's change on each old task, mean over seeds.

    Args:
        old: those of the trade-off.
        others: further ones; shown where all runs of the trade-off have them.
    """
    columns = [*old, *(one for one in others if all(one.name in point.tasks for point in trade_off.points))]
    has_mean = len(old) > 1
    rows = []
    for point in trade_off.points:
        if point.setting is None:
            continue
        cells = [
            estimate(flip(point.tasks[measure.name], shown_sign(measure)), digits(measure.unit), sign=True)
            for measure in columns
        ]
        mean = [estimate(flip(point.old, shown_sign(old[0])), digits(old[0].unit), sign=True)] if has_mean else []
        rows.append([names.setting(point.setting), *cells, *mean])
    return Table(
        "Old tasks by setting",
        [
            "setting",
            *(f"{one.name}, {units([one], is_change=True)}" for one in columns),
            *([mean_title(old, others)] if has_mean else []),
        ],
        rows,
        "Tuned minus pretrained, means over seeds"
        + (f", [95% intervals over {trade_off.drawn}]." if trade_off.has_intervals else "."),
    )


def _score(value: float, measure: Measure) -> str:
    return number(shown_sign(measure) * value, digits(measure.unit)) + ("%" if measure.unit == POINTS else " nats")


def _range(values: Sequence[float], places: int, *, sign: bool = False) -> str:
    if len(values) < 2:
        return ""
    return f"{number(min(values), places, sign=sign)} to {number(max(values), places, sign=sign)}"
