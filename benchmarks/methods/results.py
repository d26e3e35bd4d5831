"""The runs of benchmarks.methods, results.csv, and the rules that choose the next runs and the table's rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
LORA_RATES = (1e-3, 3e-3, 1e-2)
SMALLER_RATES = (1e-5, 3e-5)  # SFT alone, for small_lr
GRID: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("sft", "finch", "flow", "dft", "talr", "stm", "l2"), RATES),
    "lora": LORA_RATES,
}
# Method to the method whose runs it is made from.
DERIVED = {"small_lr": "sft", "wise_ft": "sft", "lr_replay": "finch"}
METHODS = (*GRID, *DERIVED)
SEEDS = (0, 1, 2)
SMALL_RISE = 0.02
PRETRAINED = "pretrained"


@dataclass(frozen=True)
class Run:
    """``learning_rate`` is eta_base for FINCH, and for lr_replay that of the FINCH run that it replays."""

    method: str
    learning_rate: float
    seed: int

    def folder(self, out: Path) -> Path:
        return out / "runs" / f"{self.method}_lr{self.learning_rate:g}_seed{self.seed}"

    def replayed(self) -> Run:
        """The FINCH run whose learning rates an lr_replay run reads: that of the next seed."""
        return Run("finch", self.learning_rate, SEEDS[(SEEDS.index(self.seed) + 1) % len(SEEDS)])


@dataclass(frozen=True)
class Row:
    """A run's results. Accuracies in [0, 1], losses in nats a target token, seconds of training."""

    method: str
    learning_rate: float
    seed: int
    epoch: int | None
    validation_loss: float | None
    accuracy: float
    accuracy_trained: float
    accuracy_held_out: float
    story_loss: float
    seconds: float

    @property
    def run(self) -> Run:
        return Run(self.method, self.learning_rate, self.seed)


class Results:
    """results.csv: rows are added as runs finish and read again at the next start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: dict[Run, Row] = {}
        if file.exists():
            with file.open(newline="", encoding="utf-8") as stream:
                self.rows = {row.run: row for row in map(_parse_row, csv.DictReader(stream))}

    def add(self, rows: Iterable[Row]) -> None:
        self.rows.update({row.run: row for row in rows})
        partial = self._file.with_name(self._file.name + ".partial")  # renamed when complete
        with partial.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
            writer.writeheader()
            for row in sorted(self.rows.values(), key=lambda row: (row.method, row.learning_rate, row.seed)):
                writer.writerow({key: "" if value is None else value for key, value in asdict(row).items()})
        partial.replace(self._file)

    def select(self, method: str, learning_rate: float | None = None, seed: int | None = None) -> list[Row]:
        return [
            row
            for row in self.rows.values()
            if row.method == method
            and (learning_rate is None or row.learning_rate == learning_rate)
            and (seed is None or row.seed == seed)
        ]


def _parse_row(line: dict[str, str]) -> Row:
    types: dict[str, Any] = {"method": str, "seed": int, "epoch": int}
    values: dict[str, Any] = {key: types.get(key, float)(value) if value else None for key, value in line.items()}
    return Row(**values)


def choose_rates(results: Results) -> dict[str, float]:
    """Each trained method's learning rate: that with the lowest validation loss for seed 0."""
    return {
        method: min(rows)[1]
        for method in GRID
        if (
            rows := [
                (row.validation_loss, row.learning_rate)
                for row in results.select(method, seed=0)
                if row.learning_rate in GRID[method]
            ]
        )
    }


def choose_small_rate(results: Results) -> float | None:
    """The largest learning rate of SFT, seed 0, whose story loss rises by less than SMALL_RISE; the smallest if there is none."""
    [base] = results.select(PRETRAINED)
    rows = results.select("sft", seed=0)
    if not rows:
        return None
    rates = [row.learning_rate for row in rows if row.story_loss < (1 + SMALL_RISE) * base.story_loss]
    return max(rates) if rates else min(row.learning_rate for row in rows)


def select_table_rows(results: Results) -> dict[str, list[Row]]:
    """Each method's rows that the table shows, one a seed."""
    rates = choose_rates(results)
    rows = {method: results.select(method, rate) for method, rate in rates.items()}
    if "sft" in rates:
        rows["small_lr"] = results.select("sft", choose_small_rate(results))
        rows["wise_ft"] = results.select("wise_ft", rates["sft"])
    if "finch" in rates:
        rows["lr_replay"] = results.select("lr_replay", rates["finch"])
    return {method: rows[method] for method in METHODS if rows.get(method)}


def stages(methods: Collection[str]) -> list[Callable[[Results], list[Run]]]:
    """The benchmark's stages in order, each a function from the results so far to the runs it needs."""

    def pretrained(_: Results) -> list[Run]:
        return [Run(PRETRAINED, 0.0, 0)]

    def grid(_: Results) -> list[Run]:
        runs = [Run(method, rate, 0) for method in GRID if method in methods for rate in GRID[method]]
        smaller = [Run("sft", rate, 0) for rate in SMALLER_RATES] if "small_lr" in methods else []
        return [*runs, *smaller]

    def seeds(results: Results) -> list[Run]:
        rates = [(method, rate) for method, rate in choose_rates(results).items() if method in methods]
        if "small_lr" in methods and (rate := choose_small_rate(results)) is not None:
            rates.append(("sft", rate))
        return list(dict.fromkeys(Run(method, rate, seed) for method, rate in rates for seed in SEEDS))

    def replays(results: Results) -> list[Run]:
        rate = choose_rates(results).get("finch") if "lr_replay" in methods else None
        return [] if rate is None else [Run("lr_replay", rate, seed) for seed in SEEDS]

    return [pretrained, grid, seeds, replays]
