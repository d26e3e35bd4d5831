"""`finch slurm`: submits the sbatch script of a run of TorchTitan. Those of finch's recipes: `finch run --slurm`."""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path

from finch.base.errors import UserError
from finch.cli.slurm_submit import add_script, complete_options, read_script, refuse_torchrun, split_options, submit

SCRIPT = "finch_titan.sbatch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "finch slurm --titan NAME [--nodes N] [--gpus-per-node N] [option of sbatch or torchtitan.train ...]"
    parser.add_argument("--titan", required=True, metavar="NAME", help="a config of finch.titan, or MODULE:NAME")
    parser.add_argument("--dump_folder", metavar="DIR", help="default: out/titan/NAME")
    add_script(parser)


def main(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Submits the job and prints its id and the commands to follow it; with ``--dry-run``, prints the sbatch command.

    Args:
        args: as parsed by ``add_arguments``.
        rest: arguments of torchtitan.train and options of sbatch, in any order. TorchTitan's are those with a dot or an underscore.

    Raises:
        UserError: an unknown config, a word that belongs to neither; no Slurm on this machine; sbatch fails.
    """
    module, _, name = args.titan.rpartition(":")
    known = _titan_configs()
    if not module and name not in known:
        raise UserError(
            f"--titan {name}: there is no such config; there are {', '.join(known)}, and MODULE:NAME names one of yours"
        )
    refuse_torchrun(rest)
    arguments, words = _split_arguments(rest)
    given, others = split_options(words)
    if others:
        raise UserError(
            f"{others[0]} is no option of sbatch or torchtitan.train; options of TorchTitan have the form --training.steps=100"
        )
    script, text = read_script(SCRIPT, args.script)
    job = complete_options(given, text, is_own_script=bool(args.script))
    run = Path(os.path.abspath(args.dump_folder or f"out/titan/{name}"))
    words = [module or "finch.titan", name, str(run), *arguments]
    end = "ends the job; the same command resumes from the last checkpoint"
    submit(job, script, words, run, "--dump_folder ", end, is_dry_run=args.dry_run)


def _titan_configs() -> list[str]:
    """The configs of finch.titan, read from its source: TorchTitan need not be installed where jobs are submitted."""
    source = Path(__file__).parents[1] / "titan" / "config_registry.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """TorchTitan's arguments with their values, and the other words."""
    arguments: list[str] = []
    others: list[str] = []
    target = others
    for word in words:
        if word.startswith("-") and not re.match(r"-\.?\d", word):  # a negative number is a value
            name = word.partition("=")[0]
            # Words without a dash are values, and go where their option went.
            target = arguments if word.startswith("--") and ("." in name or "_" in name) else others
        target.append(word)
    return arguments, others
