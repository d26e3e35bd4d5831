"""`finch select-lr`: the largest learning rate of a sweep that forgets little."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.errors import UserError
from finch.study.sweep.select_lr import rates_of, select_rate, sweep_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="SWEEP_OUT", help="the folder of a sweep's runs")
    parser.add_argument(
        "--method", default="sft", help="whose runs are compared: a method, or a label of the grid (default: sft)"
    )
    parser.add_argument(
        "--max-forgetting",
        type=float,
        default=2.0,
        metavar="POINTS",
        help="average forgetting must be below it (default: 2, the paper's)",
    )


def main(args: argparse.Namespace) -> None:
    """Prints a line for each rate, with 95% intervals, then the chosen rate and its runs.

    Raises:
        UserError: no run of the method is evaluated, or no rate forgets little enough.
    """
    rates = rates_of(sweep_runs(args.out), args.method)
    chosen = select_rate(rates, args.max_forgetting)
    print(f"{'optimizer.lr':<14}{'forgetting':<22}{'on the other half':<22}{'runs':<6}other values")
    for rate in rates:
        other = ", ".join(f"{key}={value}" for key, value in rate.values.items())
        mark = "  <-" if rate is chosen else ""
        row = f"{rate.lr:<14g}{rate.forgetting!s:<22}{rate.reported!s:<22}{len(rate.runs):<6}{other}{mark}"
        print(row.rstrip())
    if chosen is None:
        least = min(rates, key=lambda rate: rate.forgetting.mean)
        raise UserError(
            f"--max-forgetting {args.max_forgetting:g}: no rate of {args.method} forgets less on average, the least is {least.forgetting.mean:.2f} points at "
            f"optimizer.lr={least.lr:g}; add smaller rates to the grid"
        )
    print(
        f"\noptimizer.lr={chosen.lr:g}: {chosen.reported} points of average forgetting on the documents that did not choose it"
    )
    for run in chosen.runs:
        print(run)
