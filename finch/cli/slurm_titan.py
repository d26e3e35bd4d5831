"""`finch slurm submit --titan NAME`: submits a run of TorchTitan with FINCH."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from finch.cli.slurm import complete_options, read_script, split_options, submit_job
from finch.errors import UserError

SCRIPT = "finch_titan.sbatch"
REGISTRY = "finch.titan"


def submit(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Submits the job and prints its id and the commands to follow it; with ``--dry-run``, prints the sbatch command.

    Args:
        args: ``titan``: a config of finch.titan, or MODULE:NAME; ``script`` and ``dry_run`` as for a recipe.
        rest: arguments of torchtitan.train and options of sbatch, in any order. TorchTitan's are those with a dot or an underscore.

    Raises:
        UserError: an unknown config, a word that belongs to neither; no Slurm on this machine; sbatch fails.
    """
    module, _, name = args.titan.rpartition(":")
    if not module:
        module = REGISTRY
        if name not in config_names():
            raise UserError(
                f"--titan {name}: there is no such config; there are {', '.join(config_names())}, and MODULE:NAME names one of your own"
            )
    arguments, words = split_arguments(rest)
    given, others = split_options(words)
    if others:
        raise UserError(
            f"{others[0]} is no option of sbatch or torchtitan.train; options of TorchTitan have the form --training.steps=100"
        )
    script, text = read_script(SCRIPT, args.script)
    job = complete_options(given, text, is_own_script=bool(args.script))
    run, arguments = _dump_folder(arguments, default=f"out/titan/{name}")
    log = job.by_name.setdefault("output", f"{run}/slurm/%j.out")
    command = ["sbatch", "--parsable", *job.given, f"--output={log}", str(script), module, name, str(run), *arguments]
    end = "ends the job; the same command resumes from the last checkpoint"
    submit_job(command, job, log, run, folder_key="--dump_folder", end=end, is_dry_run=args.dry_run)


def config_names() -> list[str]:
    """The configs of finch.titan, read from its source: TorchTitan need not be installed where jobs are submitted."""
    spec = find_spec(REGISTRY)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("config_registry.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """TorchTitan's arguments with their values, and the other words."""
    arguments: list[str] = []
    others: list[str] = []
    target = others
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            target = arguments if word.startswith("--") and ("." in name or "_" in name) else others
        target.append(word)
    return arguments, others


def _dump_folder(arguments: Sequence[str], *, default: str) -> tuple[Path, list[str]]:
    """The run's folder, absolute, and the arguments without it."""
    kept: list[str] = []
    folder, is_next = default, False
    for word in arguments:
        if is_next or word.startswith("--dump_folder="):
            folder, is_next = word.removeprefix("--dump_folder="), False
        elif word == "--dump_folder":
            is_next = True
        else:
            kept.append(word)
    return Path(os.path.abspath(folder)), kept
