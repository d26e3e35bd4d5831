"""Options of all commands that read a run of anyone's."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run(parser: argparse.ArgumentParser, text: str) -> None:
    """RUN, described by ``text``, and its pretrained folder."""
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    parser.add_argument("--base", type=Path, metavar="DIR", help="the pretrained folder, where it has moved")
    add_checks(parser)


def add_checks(parser: argparse.ArgumentParser) -> None:
    trust = "the run is your own: import all that its config.yaml names, from the current folder too; take rows and links to anywhere"
    parser.add_argument("--trust", action="store_true", help=trust)
    verify = "read the models' files completely, and compare them with the digests from when they were written"
    parser.add_argument("--verify", action="store_true", help=verify)
