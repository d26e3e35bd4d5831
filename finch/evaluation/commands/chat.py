"""`finch chat`: the pretrained and the tuned model's answers, side by side."""

from __future__ import annotations

import argparse
import contextlib

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.cli.arguments import positive
from finch.cli.early_checks import only_errors_logged
from finch.evaluation.commands.arguments import add_run, check_run, find_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the run's folder, or its average")
    text = "answer this one and end; default: those that are typed, a conversation; /clear starts a new one"
    parser.add_argument("--prompt", metavar="TEXT", help=text)
    text = "of an answer (default: 256)"
    parser.add_argument("--max-new-tokens", type=positive(int), default=256, metavar="N", help=text)
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="default: 0, the likeliest tokens"
    )


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text} must be 0 or a number above it")


def main(parsed: argparse.Namespace) -> None:
    """Prints both answers to each prompt. Raises UserError for an empty one."""
    require_extras("finch chat", "torchtune")
    if parsed.prompt is not None and not parsed.prompt.strip():
        raise UserError("--prompt is empty; give a text, or leave it out for a conversation")
    find_models(parsed)
    check_run(parsed.run)
    from rich.console import Console

    from finch.evaluation.chat import Chat, talk

    options = {name: getattr(parsed, name) for name in ("max_new_tokens", "temperature", "trust", "verify")}
    with only_errors_logged():
        models = Chat(parsed.run, parsed.base, **options)
    talk(models, parsed.prompt, Console())
