"""`finch report --select-lr`: the largest learning rate of a sweep that forgets little."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.errors import UserError
from finch.evaluation.commands.evaluate import aligned
from finch.study.sweep.select_lr import MAX_FORGETTING, rates_of, select_rate, sweep_runs, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, metavar="SWEEP_OUT", help="the folder of a sweep's runs")
    add("--method", default="sft", help="whose runs are compared: a method, or a label of the grid (default: sft)")
    text = f"average forgetting must be below it (default: {MAX_FORGETTING:g}, the paper's)"
    add("--max-forgetting", type=float, default=MAX_FORGETTING, metavar="POINTS", help=text)


def main(args: argparse.Namespace) -> None:
    """Prints a line for each rate, with 95% intervals, then the chosen rate and its runs.

    Raises:
        UserError: no run of the method is evaluated, or no rate forgets little enough.
    """
    rates = rates_of(sweep_runs(args.out), args.method)
    chosen = select_rate(rates, args.max_forgetting)
    rows = table(rates)
    marks = ["", *("<-" if rate is chosen else "" for rate in rates)]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    print(aligned([[*cells, mark] for cells, mark in zip(lines, marks, strict=True)]))
    if chosen is None:
        least = min(rates, key=lambda rate: rate.forgetting.mean)
        raise UserError(
            f"--max-forgetting {args.max_forgetting:g}: no rate of {args.method} forgets less on average, the least is {least.forgetting.mean:.2f} points at "
            f"optimizer.lr={least.lr:g}; add smaller rates to the grid"
        )
    print(
        f"\noptimizer.lr={chosen.lr:g}: {chosen.reported} points of average forgetting on the documents that did not choose it"
    )
    print(*chosen.runs, sep="\n")
