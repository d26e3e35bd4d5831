"""`finch average`: the average of a run's model with its pretrained one."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.extras import require_extras
from finch.base.log import printable
from finch.evaluation.commands.arguments import add_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the pretrained folder, where it has moved")
    add_checks(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--alpha", type=float, help="the tuned model's share; default: the knee of learning and forgetting"
    )
    chosen.add_argument("--keep", type=float, help="the smallest alpha that keeps this share of what was learned: 0.95")
    chosen.add_argument(
        "--budget", type=float, help="the largest alpha that forgets at most this many nats per token: 0.1"
    )


def main(parsed: argparse.Namespace) -> None:
    """Writes RUN/average and says what was chosen."""
    require_extras("finch average", "torchtune")
    from finch.evaluation.average import Choice
    from finch.evaluation.average import average as choose

    for line in choose(
        parsed.run,
        Choice(parsed.alpha, parsed.keep, parsed.budget),
        base=parsed.base,
        trust=parsed.trust,
        verify=parsed.verify,
    ):
        print(printable(line))
