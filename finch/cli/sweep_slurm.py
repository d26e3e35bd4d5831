"""`finch sweep --slurm`: submits a sweep as job arrays, a task a cell, and an evaluation that depends on them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from finch.cli.slurm import SCRIPT, JobOptions, complete_options, read_script, run_sbatch
from finch.cli.sweep_jobs import compose, warn_of_missing_validation
from finch.errors import UserError
from finch.files import atomic_file, write_text
from finch.sweep.grid import RUN, WAITING, Grid, cells_of, write_cell
from finch.sweep.job import Job, is_overwrite, run_words

SWEEP_SCRIPT = "sweep.sbatch"


def submit_sweep(
    grid: Grid,
    options: Sequence[str],
    words: Sequence[str],
    *,
    max_parallel: int | None,
    is_dry_run: bool,
    trains: bool = True,
) -> None:
    """Submits the cells that are not trained: an array, a second one of the cells that need runs of the first, and a job that makes
    WiSE-FT's models and evaluates. Prints the jobs' ids, or with ``is_dry_run`` the commands.

    Args:
        options: sbatch's.
        words: GRID and its overrides, as given.
        max_parallel: tasks of an array at a time; None: no limit.
        trains: whether the arrays are submitted.

    Raises:
        UserError: a mistake in a cell's config or in the options; no Slurm on this machine; sbatch fails.
    """
    if is_overwrite(grid):
        raise UserError(
            "overwrite=True: a job that is requeued would start from scratch again; remove the cells' folders, or give another --out"
        )
    run_script, run_text = read_script(SCRIPT)
    sweep_script, sweep_text = read_script(SWEEP_SCRIPT)
    job_options = complete_options(options, f"{run_text}\n{sweep_text}")
    jobs = compose(grid, cells_of(grid), is_here=False, num_ranks=job_options.num_ranks)
    warn_of_missing_validation(jobs)
    left = [job for job in jobs if trains and job.cell.kind == RUN and not job.is_trained()]
    left_folders = {job.cell.folder for job in left}
    first = [job for job in left if job.cell.source not in left_folders]
    second = [job for job in left if job.cell.source in left_folders]
    submission = _Submission(grid, job_options, (run_script, sweep_script), is_dry_run=is_dry_run)
    ids: list[str] = []
    for group in (first, second):
        if group:
            ids.append(submission.submit_array(group, max_parallel, after=ids))
    if grid.evaluation is not None or any(job.cell.kind != RUN for job in jobs):
        ids.append(submission.submit_evaluation(words, after=ids))
    if not ids:
        print(f"all {len(jobs)} cells are trained; there is nothing to submit")
    elif not is_dry_run:
        print(f"{len(left)} of {len(jobs)} cells to train in {grid.out}")
        print(f"  squeue --jobs {','.join(ids)}")
        print(f"  tail -F {submission.folder}/*.out")
        print(f"  scancel {' '.join(ids)}    # saves and ends the jobs; the same command continues the sweep")


class _Submission:
    """OUT/slurm: the scripts as they were when the jobs were submitted, the files of cells, and the jobs' output."""

    def __init__(self, grid: Grid, options: JobOptions, scripts: tuple[Path, Path], *, is_dry_run: bool) -> None:
        self._grid, self._options, self._is_dry_run = grid, options, is_dry_run
        self.folder = grid.out / "slurm"
        self._run_script, self._sweep_script = (self.folder / script.name for script in scripts)
        if not is_dry_run:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for script in scripts:
                    with atomic_file(self.folder / script.name) as partial:
                        shutil.copyfile(script, partial)
            except OSError as error:
                raise UserError(f"out={grid.out} cannot be written ({error.strerror}); give another --out") from error

    def submit_array(self, jobs: Sequence[Job], max_parallel: int | None, *, after: Sequence[str]) -> str:
        """Returns the array's id."""
        lines = [shlex.join([job.recipe, *_absolute(run_words(self._grid, job.cell)[1:])]) + "\n" for job in jobs]
        number = next(index for index in range(10**6) if not (self.folder / f"cells_{index}").exists())
        cells = self.folder / f"cells_{number + len(after)}"
        limit = "" if max_parallel is None else f"%{max_parallel}"
        words = [f"--array=0-{len(jobs) - 1}{limit}", *_dependency(after), f"--output={self.folder}/%A_%a.out"]
        command = [str(self._sweep_script), str(cells), str(self._run_script)]
        if self._is_dry_run:
            for index, line in enumerate(lines):
                print(f"# task {index} of {cells}: {line}", end="")
        else:
            with atomic_file(cells) as partial:
                write_text(partial, "".join(lines))
            for job in jobs:
                write_cell(job.cell, task=self._grid.task, status=WAITING)
        return self._submit([*self._options.given, *words, *command])

    def submit_evaluation(self, words: Sequence[str], *, after: Sequence[str]) -> str:
        """Returns the job's id. The job has one node; as many evaluations run at a time as it has GPUs."""
        gpus = self._options.by_name.get("gpus-per-node", "1").rpartition(":")[2]
        options = ["--nodes=1", *_dependency(after), f"--output={self.folder}/%j.out"]
        name, *overrides = words
        arguments = [os.path.abspath(name) if Path(name).is_file() else name, *overrides]
        arguments += ["--out", str(self._grid.out), "--jobs", gpus if gpus.isdigit() and int(gpus) > 0 else "1"]
        return self._submit([*self._options.given, *options, str(self._sweep_script), *arguments])

    def _submit(self, words: Sequence[str]) -> str:
        command = ["sbatch", "--parsable", *words]
        settings: Mapping[str, str] = self._options.settings
        if self._is_dry_run:
            variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
            print(*variables, shlex.join(command))
            return "JOB"
        return run_sbatch(command, settings)


def _dependency(after: Sequence[str]) -> list[str]:
    """``afterany``: a cell that failed does not keep the others from being evaluated."""
    return [f"--dependency=afterany:{':'.join(after)}"] if after else []


def _absolute(words: Sequence[str]) -> list[str]:
    """CONFIG as an absolute path where it is a file; the overrides as they are."""
    config, *overrides = words
    return [os.path.abspath(config) if Path(config).is_file() else config, *overrides]
