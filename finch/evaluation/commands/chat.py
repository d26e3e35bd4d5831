"""`finch chat`: the pretrained and the tuned model's answers, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.extras import require_extras
from finch.cli.arguments import positive
from finch.cli.early_checks import only_errors_logged
from finch.evaluation.commands.arguments import add_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its average")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the pretrained folder, where it has moved")
    add_checks(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this one and end; default: those that are typed")
    parser.add_argument(
        "--max-new-tokens", type=positive(int), default=256, metavar="N", help="of an answer (default: 256)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest tokens")


def main(parsed: argparse.Namespace) -> None:
    """Prints both answers to each prompt."""
    require_extras("finch chat", "torchtune")
    from rich.console import Console

    from finch.evaluation.chat import Chat, talk

    options = {
        "max_new_tokens": parsed.max_new_tokens,
        "temperature": parsed.temperature,
        "trust": parsed.trust,
        "verify": parsed.verify,
    }
    with only_errors_logged():
        models = Chat(parsed.run, parsed.base, **options)
    talk(models, parsed.prompt, Console())
