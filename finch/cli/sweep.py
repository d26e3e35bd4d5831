"""`finch sweep`: the runs of a grid, on this machine or as a Slurm job array.

Every cell's config is composed and checked before anything starts.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finch.cli.early_checks import config_checks, machine_checks, read_job
from finch.errors import UserError
from finch.log import logger

if TYPE_CHECKING:
    from finch.sweep.cells import Cell
    from finch.sweep.grid import Grid
    from finch.sweep.job import Job

USAGE = "finch sweep GRID [--jobs N] [--dry-run] [--slurm [option of sbatch ...]] [key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `finch sweep` itself. GRID, overrides and sbatch's options are what the parser leaves over."""
    parser.usage = USAGE
    parser.epilog = (
        "GRID is a YAML file or a name such as sweeps/qwen3_4B_knowledge; docs/sweep.md describes it. key=value and ~key change all "
        "runs, evaluate.KEY=value the evaluation. The same command continues a sweep: finished cells are skipped, cut-off ones resumed, "
        "failed ones tried again."
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="cells at a time (default: 1; with --slurm: no limit)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("--out", metavar="DIR", help="in place of the grid's out")
    parser.add_argument("--nproc_per_node", metavar="N", help="ranks of each run, as for finch run (default: 1)")
    parser.add_argument(
        "--skip-training", action="store_true", help="train nothing: evaluate the cells that are trained"
    )
    parser.add_argument("--slurm", action="store_true", help="submit a job array; all other options are sbatch's")


def sweep(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Runs the sweep; ends the process with 1 if a cell has failed.

    Args:
        args: as parsed by ``add_arguments``.
        rest: GRID, overrides and, with ``--slurm``, sbatch's options.

    Raises:
        UserError: a mistake in the grid, in a cell's config or in the options.
    """
    from finch.cli.slurm import split_options
    from finch.sweep.grid import cells_of, read_grid

    options, words = split_options(rest)
    if options and not args.slurm:
        raise UserError(f"{options[0]} is not an option of finch sweep; options of sbatch need --slurm")
    if not words:
        raise UserError(f"GRID is missing: {USAGE}")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} must be at least 1")
    name, *overrides = words
    grid = read_grid(name, overrides, args.out)
    if args.slurm:
        from finch.cli.sweep_slurm import submit_sweep

        submit_sweep(grid, options, [name, *overrides], max_parallel=args.jobs, is_dry_run=args.dry_run)
        return
    launcher, num_ranks = _ranks(args)
    jobs = compose(grid, cells_of(grid), launcher=launcher, num_ranks=num_ranks)
    warn_of_missing_validation(jobs)
    if args.dry_run:
        _print_commands(jobs)
    else:
        _run(grid, jobs, args)


def compose(
    grid: Grid, cells: Sequence[Cell], *, launcher: Sequence[str] = (), is_here: bool = True, num_ranks: int | None = 1
) -> list[Job]:
    """The jobs of cells, with complete and checked configs.

    Args:
        launcher: options of `finch run` that start a run's ranks.
        is_here: whether they run on this machine.
        num_ranks: of a run; None: not known.

    Raises:
        UserError: the first wrong cell, and what is wrong.
    """
    level = logger.level
    logger.setLevel(logging.ERROR)  # reading a config logs what the run logs again
    jobs: dict[Path, Job] = {}
    try:
        for cell in cells:
            try:
                jobs[cell.folder] = _compose(grid, cell, jobs, launcher, is_here, num_ranks)
            except UserError as error:
                raise UserError(f"cell {cell.name}: {error}") from error
    finally:
        logger.setLevel(level)
    return list(jobs.values())


def _compose(
    grid: Grid,
    cell: Cell,
    jobs: Mapping[Path, Job],
    launcher: Sequence[str],
    is_here: bool,
    num_ranks: int | None,
) -> Job:
    from finch.sweep.cells import RUN
    from finch.sweep.job import Job, run_words
    from finch.sweep.run_state import different_key

    if cell.kind != RUN:  # it stands on a run of the grid
        source = jobs[cell.waits_for[0]]
        return Job(grid, cell, source.recipe, source.cfg)
    recipe, cfg = read_job(grid.config, run_words(grid, cell)[2:])
    if grid.recipe is not None and recipe != grid.recipe:
        raise UserError(f"recipe={grid.recipe} does not train its model, {recipe} does; leave recipe out of the grid")
    is_log_missing = cell.source is not None and not (cell.source / "metrics.jsonl").exists()
    for check in config_checks(cfg, num_ranks):
        if not is_log_missing:
            check()
    if is_here:
        for check in machine_checks(recipe, cfg, num_ranks or 1):
            check()
    job = Job(grid, cell, recipe, cfg, launcher)
    if not job.overwrites and (different := different_key(cell.folder, cfg)):
        key, saved, given = different
        raise UserError(
            f"{cell.folder} holds a run with {key}={_short(saved)}, the grid says {_short(given)}; give another out, or overwrite=True"
        )
    return job


def _run(grid: Grid, jobs: Sequence[Job], args: argparse.Namespace) -> None:
    import torch

    from finch.sweep.local import LocalSweep

    try:
        grid.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={grid.out} cannot be written ({error.strerror}); give another folder by --out") from error
    num_gpus = 0 if args.nproc_per_node else torch.cuda.device_count()
    local = LocalSweep(jobs, num_parallel=args.jobs or 1, num_gpus=num_gpus, trains=not args.skip_training)
    print(f"{len(jobs)} cells in {grid.out}, {args.jobs or 1} at a time", flush=True)
    num_failed = local.run()
    if num_failed:
        for name, reason in local.failures().items():
            print(f"finch: error: {name}: {reason}", file=sys.stderr)
        print(f"{num_failed} of {len(jobs)} cells failed; the same command tries them again", flush=True)
        sys.exit(1)
    print(f"all {len(jobs)} cells are done", flush=True)


def _print_commands(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.cell.candidates:
            names = ", ".join(path.name for path in job.cell.candidates)
            print(f"# {job.cell.name}: the run that finch select-lr chooses of {names}")
        elif job.is_trained() and not job.overwrites:
            print(f"# {job.cell.name}: trained")
        else:
            print(shlex.join(job.run_command()))
        for command in job.evaluate_commands():
            print(shlex.join(command))


def _ranks(args: argparse.Namespace) -> tuple[list[str], int]:
    """Options of `finch run`, and the number of ranks that they start.

    Raises:
        UserError: torchrun does not understand the number.
    """
    if args.nproc_per_node is None:
        return [], 1
    from torch.distributed.run import determine_local_world_size

    try:
        return ["--nproc_per_node", args.nproc_per_node], determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--nproc_per_node {args.nproc_per_node}: {error}; give a number, or gpu") from error


def warn_of_missing_validation(jobs: Sequence[Job]) -> None:
    names = [job.cell.name for job in jobs if not job.has_validation]
    if names:
        logger.warning(
            f"{len(names)} of {len(jobs)} cells have no validation rows, such as {names[0]}: their last epoch counts, where the paper chooses an "
            "epoch by validation; set dataset_validation"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
