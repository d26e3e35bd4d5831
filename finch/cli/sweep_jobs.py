"""The jobs of a sweep: every cell's config is composed and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from finch import run_files
from finch.cli.early_checks import config_checks, machine_checks, read_job
from finch.errors import UserError
from finch.log import logger
from finch.sweep.grid import RUN, Cell, Grid
from finch.sweep.job import Job, different_key, run_words


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
    if cell.kind != RUN:  # it stands on a run of the grid
        source = jobs[cell.dependencies[0]]
        return Job(grid, cell, source.recipe, source.cfg)
    recipe, cfg = read_job(grid.config, run_words(grid, cell)[2:])
    if grid.recipe is not None and recipe != grid.recipe:
        raise UserError(f"recipe={grid.recipe} does not train its model, {recipe} does; leave recipe out of the grid")
    is_log_missing = cell.source is not None and not (cell.source / run_files.METRICS).exists()
    if is_log_missing:
        from finch.training.config_checks import check_replay_shape

        check_replay_shape(cfg)
    else:
        for check in config_checks(cfg, num_ranks):
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
