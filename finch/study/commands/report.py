"""`finch report`: what runs have learned and what they have forgotten."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.extras import require_extras
from finch.base.log import printable
from finch.cli.arguments import names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a sweep's: all of its cells")
    text = "folder for report.html, report.md, summary.csv and figures"
    add("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "the evaluated task, or the probe, that was learned, where there are several new ones"
    add("--new-task", metavar="NAME", help=text)
    text = (
        "the old tasks of the trade-off, with commas: evaluated tasks, or probes such as stories.loss or own_answers.kl, all of one unit "
        "(points or nats); default: all old tasks, those in points where there are both. The others are in the tables of changes"
    )
    add("--old-tasks", type=names, metavar="NAMES", help=text)
    text = "folder of the pretrained model's results, where they are no longer where finch evaluate wrote them"
    add("--base", type=Path, metavar="DIR", help=text)


def main(parsed: argparse.Namespace) -> None:
    """Writes the report and prints where it is."""
    require_extras("finch report", "torchtune", "report")
    from finch.study.report.runs import find_runs

    find_runs(parsed.runs)  # a wrong folder is named before what draws is imported
    from finch.study.report.report import write_report

    options = {"new_task": parsed.new_task, "old_tasks": parsed.old_tasks, "base": parsed.base}
    print(printable(str(write_report(parsed.runs, parsed.out, **options))))
