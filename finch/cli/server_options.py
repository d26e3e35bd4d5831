"""Options of the commands that ask a language model on a server with OpenAI's protocol."""

from __future__ import annotations

import argparse


def add_server_options(parser: argparse.ArgumentParser, *, budget_of: str, limit_of: str) -> None:
    """
    Args:
        budget_of: what the calls are for, in the help.
        limit_of: what ``--limit`` counts.
    """
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="of the server, such as http://localhost:8000/v1"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="its name on the server")
    parser.add_argument(
        "--max-tokens-budget",
        type=positive_int,
        metavar="N",
        help=f"tokens that all calls for {budget_of} may take, prompts and answers, earlier starts included (default: no limit)",
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help=f"only the first N {limit_of}")
    parser.add_argument("--concurrency", type=positive_int, default=4, metavar="N", help="calls at a time (default: 4)")
    parser.add_argument("--timeout", type=positive_int, default=120, metavar="SECONDS", help="of a call (default: 120)")
    parser.add_argument("--dry-run", action="store_true", help=f"count {limit_of}, calls and tokens, and send nothing")


def positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value
