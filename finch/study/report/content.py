"""What all parts of a report are made of: the comparison, its trade-off and fronts, and the names of settings and runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from finch.study.report.front import (
    FOLDER,
    Front,
    Setting,
    TradeOff,
    choose_by,
    compare_fronts,
    group_settings,
    trade_off,
)
from finch.study.report.measures import Comparison
from finch.study.report.paper import TASKS, paper_model
from finch.study.report.runs import Run
from finch.study.report.selection import Measure
from finch.study.report.style import Style, method_styles
from finch.study.sweep.grid import LR


@dataclass(frozen=True)
class Names:
    """The names of settings and runs: the method, the learning rate, and the values that differ between them."""

    styles: Mapping[str, Style]
    varying: Sequence[str]

    @property
    def labels(self) -> list[str]:
        """The methods'."""
        return [style.label for style in self.styles.values()]

    def of(self, one: Setting | Run) -> str:
        texts = [self.styles[one.method].label]
        for key, value in ((key, one.values.get(key)) for key in (LR, *self.varying)):
            if key == LR and isinstance(value, (int, float)):
                mantissa, _, exponent = f"{value:.3e}".partition("e")
                texts.append(f"lr {mantissa.rstrip('0').rstrip('.')}e{int(exponent)}")
            elif value is not None:
                texts.append(str(value) if key == FOLDER else f"{key.rpartition('.')[2].replace('_', ' ')} {value}")
        return ", ".join(texts)


@dataclass(frozen=True)
class Report:
    """Everything that the parts of a report are made of.

    Attributes:
        folder: for the figures.
    """

    comparison: Comparison
    settings: Sequence[Setting]
    trade_off: TradeOff
    front: Front
    names: Names
    folder: Path

    @classmethod
    def of(cls, comparison: Comparison, folder: Path) -> Report:
        """
        Raises:
            UserError: two runs were evaluated on different documents of a task.
        """
        settings = group_settings(comparison)
        keys = dict.fromkeys(key for setting in settings for key in setting.values if key != LR)
        values = {key: {str(one.values[key]) for one in settings if key in one.values} for key in keys}
        varying = [key for key in keys if len(values[key]) > 1 or key == FOLDER]
        names = Names(method_styles(run.method for run in comparison.runs), varying)
        points = trade_off(comparison, settings)
        # The common scores are in steps of the last decimal that is shown.
        resolution = 10.0 ** -(comparison.new.places if comparison.new is not None else 1)
        front = compare_fronts(points, resolution=resolution, order=list(names.styles))
        return cls(comparison, settings, points, front, names, folder)

    @property
    def new(self) -> Measure:
        """The new task of the trade-off."""
        assert self.comparison.new is not None
        return self.comparison.new

    @property
    def old(self) -> Measure:
        """The first old task of the trade-off, whose unit all have."""
        return self.comparison.old[0]

    @property
    def which_settings(self) -> str:
        """What ``shown_runs`` are."""
        return f"Of each method the setting with the best {choose_by(self.comparison, self.trade_off)[1]}"

    @cached_property
    def shown_runs(self) -> list[Run]:
        """For curves: of each method the best setting, else its first one with metrics."""
        runs = self.comparison.runs
        scores, _ = choose_by(self.comparison, self.trade_off)
        best: dict[str, Setting] = {}
        for setting in sorted(self.settings, key=lambda one: -scores.get(one, -math.inf)):
            if any(runs[number].metrics for number in setting.runs):
                best.setdefault(setting.method, setting)
        return [runs[number] for method in self.names.styles if method in best for number in best[method].runs]

    @cached_property
    def paper_task(self) -> tuple[str | None, str | None]:
        """A task and a model of the paper's, where the new task and the runs' model are ones."""
        new, runs = self.comparison.new, self.comparison.runs
        named = next((run.task for run in runs if run.task is not None), None)
        task = next((name for name in (new.source if new else None, named) if name in TASKS), None)
        return task, next((model for run in runs if (model := paper_model(run)) is not None), None)
