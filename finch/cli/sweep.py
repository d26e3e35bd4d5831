"""`finch sweep`: the runs of a grid, on this machine or as a Slurm job array.

Every cell's config is composed and checked before anything starts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from finch.errors import UserError

if TYPE_CHECKING:
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
    from finch.cli.sweep_jobs import compose, warn_of_missing_validation
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

        submit_sweep(
            grid,
            options,
            [name, *overrides],
            max_parallel=args.jobs,
            is_dry_run=args.dry_run,
            trains=not args.skip_training,
        )
        return
    launcher, num_ranks = _ranks(args)
    jobs = compose(grid, cells_of(grid), launcher=launcher, num_ranks=num_ranks)
    warn_of_missing_validation(jobs)
    if args.dry_run:
        _print_commands(jobs)
    else:
        _run(grid, jobs, args)


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
    from finch.sweep.grid import SMALL_LR

    for job in jobs:
        if job.cell.kind == SMALL_LR:
            names = ", ".join(path.name for path in job.cell.dependencies)
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
