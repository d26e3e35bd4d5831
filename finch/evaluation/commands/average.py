"""`finch average`: the average of a run's model with its pretrained one."""

from __future__ import annotations

import argparse

from finch.base.extras import require_extras
from finch.base.log import printable
from finch.evaluation.choice import Choice
from finch.evaluation.commands.arguments import add_run, check_run, find_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the run's folder")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--alpha", type=float, help="the tuned model's share; default: the knee of learning and forgetting")
    add("--keep", type=float, help="the smallest alpha that keeps this share of what was learned: 0.95")
    add("--budget", type=float, help="the largest alpha that forgets at most this many nats per token: 0.1")


def main(parsed: argparse.Namespace) -> None:
    """Writes RUN/average and says what was chosen."""
    require_extras("finch average", "torchtune")
    find_models(parsed)
    check_run(parsed.run)
    choice = Choice(parsed.alpha, parsed.keep, parsed.budget)
    choice.check()
    from finch.evaluation.average import average as choose

    for line in choose(parsed.run, choice, base=parsed.base, trust=parsed.trust, verify=parsed.verify):
        print(printable(line))
