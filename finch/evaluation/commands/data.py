"""`finch data`: rows to train on."""

from __future__ import annotations

import argparse

from finch.evaluation.commands import judge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    judge.add_translate_arguments(
        actions.add_parser("translate", help="translate instruction rows through a server with OpenAI's protocol")
    )


main = judge.translate
