"""The `finch` command. Imports torch only where a subcommand needs it."""

from __future__ import annotations

import argparse
import sys

from finch import __version__


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="finch", description="Forgetting-aware fine-tuning for the PyTorch-native stack."
    )
    parser.add_argument("--version", action="version", version=f"finch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("configs", help="list the configs that `tune run finch_full_finetune --config NAME` finds")
    chosen = parser.parse_args(arguments)
    if chosen.command == "configs":
        list_configs()
    else:
        parser.print_help()
        sys.exit(2)


def list_configs() -> None:
    """Prints each config's name and the first line of its header."""
    from finch.names import config_names

    names = config_names()
    for name, path in names.items():
        header = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        print(f"{name:<{max(map(len, names))}}  {header}")
