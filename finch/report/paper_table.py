"""The table of the paper's numbers beside those measured here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from finch.report.formatting import NONE, number
from finch.report.measures import Comparison
from finch.report.paper.numbers import METRICS
from finch.report.settings import TradeOff
from finch.report.tables import Names, Table


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
    labels = {run.label for run in comparison.runs}
    paper = {method: values for method, values in paper.items() if method not in labels}
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
            *(METRICS.get(one.name, one.name) for one in columns),
            "mean of old tasks",
        ],
        rows,
        "New-task score in percent, changes in points. The paper's are of its tables, each method at its own learning rate.",
        text_columns=(0, 1),
    )
