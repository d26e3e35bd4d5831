"""Options of all commands that read a run of anyone's."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.errors import UserError
from finch.base.hub import local_path
from finch.base.run_files import CONFIG, chosen_model


def add_run(parser: argparse.ArgumentParser, text: str) -> None:
    """RUN, described by ``text``, and its pretrained folder."""
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    parser.add_argument("--base", metavar="DIR", help="the pretrained folder where it has moved, or a name on the hub")
    add_checks(parser)


def find_models(parsed: argparse.Namespace) -> None:
    """Makes paths of ``base`` and ``tuned``, which may be names on the hub. Raises UserError as :func:`finch.base.hub.local_path`."""
    for name in vars(parsed).keys() & {"base", "tuned"}:
        found = local_path(f"--{name}", getattr(parsed, name))
        many = isinstance(found, list)
        setattr(parsed, name, [Path(one) for one in found] if many else None if found is None else Path(found))


def check_run(run: Path) -> None:
    """Raises UserError for a folder that is no run with a model and none of a run's models. Needs no torch, unlike what reads them."""
    if not any((each / CONFIG).is_file() for each in (run, run.resolve().parent)):
        raise UserError(f"{run / CONFIG} does not exist; give the folder of a run that has ended an epoch")
    if (run / CONFIG).is_file() and chosen_model(run) is None:
        raise UserError(f"{run} has no model: give the folder of a run that has ended an epoch")


def add_checks(parser: argparse.ArgumentParser) -> None:
    trust = "the run is your own: import all that its config.yaml names, from the current folder too; take rows and links to anywhere"
    parser.add_argument("--trust", action="store_true", help=trust)
    verify = "read the models' files completely, and compare them with the digests from when they were written"
    parser.add_argument("--verify", action="store_true", help=verify)
