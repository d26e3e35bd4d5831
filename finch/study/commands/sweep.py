"""`finch sweep`: the runs of a grid, on this machine or as a Slurm job array.

Every cell's config is composed and checked before anything starts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finch.base import hub, run_files
from finch.base.errors import UsageError, UserError, writing
from finch.base.extras import require_extras
from finch.base.files import atomic_file, existing_part, gigabytes, make_folder, replace_text, write_text
from finch.base.log import logger
from finch.cli.early_checks import build_model, config_checks, machine_checks, only_errors_logged, read_job
from finch.cli.run import number_of_ranks
from finch.cli.slurm_submit import (
    SCRIPT,
    JobOptions,
    absolute,
    as_shell,
    complete_options,
    read_script,
    run_sbatch,
    split_options,
)
from finch.config.instantiate import did_you_mean
from finch.evaluation.commands.evaluate import check_data, check_harness
from finch.evaluation.tasks.registry import select_tasks
from finch.study.sweep.grid import (
    RUN,
    SMALL_LR,
    WAITING,
    WISE_FT,
    Cell,
    Evaluation,
    Grid,
    cells_of,
    read_grid,
    write_cell,
)
from finch.study.sweep.job import Job, check_method, different_key, row_hashes, run_words

SWEEP_SCRIPT = "sweep.sbatch"
_EVALUATION = "evaluation"  # among the names of cells, which have a = or a method's
_AUTO_CAP, _NO_AVERAGE = "lr_scheduler.eta_max=auto", "average=null"
USAGE = "finch sweep GRID [--jobs N] [--dry-run] [--slurm [option of sbatch ...]] [key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `finch sweep` itself. GRID, overrides and sbatch's options are what the parser leaves over."""
    parser.usage = USAGE
    parser.epilog = (
        "GRID is a YAML file or a name such as sweeps/qwen3_4B_knowledge; docs/sweep.md describes it. key=value and ~key change all "
        "runs, evaluate.KEY=value the evaluation. The same command continues a sweep: finished cells are skipped, cut-off ones resumed, "
        "failed ones tried again."
    )
    add = parser.add_argument
    add("--jobs", type=int, metavar="N", help="cells at a time (default: 1; with --slurm: no limit)")
    text = "print the cells, what is left to do and the first cell's commands, and check all that a sweep checks; start nothing"
    add("--dry-run", action="store_true", help=text)
    add("--out", metavar="DIR", help="in place of the grid's out")
    add("--nproc_per_node", metavar="N", help="ranks of each run, as for finch run (default: 1)")
    add("--skip-training", action="store_true", help="train nothing: evaluate the cells that are trained")
    add("--slurm", action="store_true", help="submit a job array; all other options are sbatch's")


def main(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Runs the sweep; ends the process with 1 if a cell has failed.

    Args:
        rest: GRID, overrides and, with ``--slurm``, sbatch's options.

    Raises:
        UserError: a mistake in the grid, in a cell's config or in the options.
    """
    require_extras("finch sweep", "torchtune")
    options, words = split_options(rest)
    if options and not args.slurm:
        known = ["--nproc_per_node", *(f"--{name.replace('_', '-')}" for name in vars(args))]
        hint = did_you_mean(options[0], known, cutoff=0.8)
        raise UsageError(f"{options[0]} is not an option of finch sweep{hint or ';'} options of sbatch need --slurm")
    if not words:
        raise UsageError(f"GRID is missing: {USAGE}")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} must be at least 1")
    grid = read_grid(words[0], words[1:], args.out)
    if args.slurm and args.nproc_per_node:
        raise UsageError(
            f"--nproc_per_node={args.nproc_per_node} is for this machine; with --slurm the ranks of a run are its GPUs: --gpus-per-node={args.nproc_per_node}"
        )
    if args.slurm:
        _submit_sweep(grid, options, words, args)
        return
    launcher, num_ranks = _ranks(args)
    jobs = compose(grid, cells_of(grid), launcher=launcher, num_ranks=num_ranks)
    if args.dry_run:
        _print_cells(grid, jobs)
    _check_machine(grid, jobs, args)
    if not args.dry_run:
        _run(grid, jobs, args)


def _check_machine(grid: Grid, jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Raises UserError if what the evaluation needs, or room on the disk, is missing."""
    if grid.evaluation is not None and any(job.evaluate_commands() for job in jobs):
        _check_evaluation(grid.evaluation)
    if not args.skip_training:
        _check_disk(grid, jobs, args.jobs or 1)


def _check_evaluation(evaluation: Evaluation) -> None:
    """What a sweep's evaluation needs on this machine: packages, its base, data sets, lm-eval's tasks, IFEval's sentence splitter.

    Raises:
        UserError: the first that is missing, and how to get it.
    """
    from finch.evaluation.custom_tasks import check_name
    from finch.evaluation.model_folders import find_base

    require_extras("the sweep's evaluation", "evaluate")
    check_harness()
    if evaluation.base is not None:
        find_base(Path(hub.local_path("--base", evaluation.base)))
    tasks, others = select_tasks(evaluation.suites, evaluation.tasks, "suites=", "tasks=")
    folders = [None if path is None else Path(path) for path in (evaluation.data_root, evaluation.include_path)]
    check_data(tasks, *folders)
    if others:
        from finch.evaluation.harness import quiet_harness, task_manager

        with quiet_harness():
            manager = task_manager(folders[0], has_chat_template=False, include_path=folders[1], others=others)
            for name in others:
                check_name(name, manager)


def _run(grid: Grid, jobs: Sequence[Job], args: argparse.Namespace) -> None:
    import torch

    from finch.study.sweep.local import LocalSweep

    with writing(f"out={grid.out}", "give another folder by --out"):
        make_folder(grid.out)
    num_gpus, num_parallel, num_ranks = torch.cuda.device_count(), args.jobs or 1, _ranks(args)[1]
    if num_ranks <= num_gpus < num_parallel * num_ranks:
        logger.warning(
            f"--jobs {num_parallel}: there {'is one GPU' if num_gpus == 1 else f'are {num_gpus} GPUs'} here, whose memory cells share; --jobs "
            f"{num_gpus // num_ranks} gives each cell its own"
        )
    local = LocalSweep(
        jobs, num_parallel=num_parallel, num_gpus=num_gpus, num_ranks=num_ranks, trains=not args.skip_training
    )
    print(f"{len(jobs)} cells in {grid.out}, {args.jobs or 1} at a time", flush=True)
    failures = local.run()
    if failures:
        alike = defaultdict(list)
        for name, reason in failures.items():
            alike[reason.replace(name, "")].append(name)
        for first, *others in alike.values():
            more = f" and {len(others)} more" if others else ""
            print(f"finch: error: {first}{more}: {failures[first]}", file=sys.stderr)
        print(f"{len(failures)} of {len(jobs)} cells failed; the same command tries them again", flush=True)
        sys.exit(1)
    print(f"all {len(jobs)} cells are done", flush=True)


def _check_disk(grid: Grid, jobs: Sequence[Job], num_parallel: int) -> None:
    """Raises UserError if the models that the grid keeps do not fit, and the epochs of the cells that are trained or scored at a time; they
    are taken to be of the first cell's size."""
    from finch.training.run import disk_use, num_exports

    runs = [job for job in jobs if job.cell.kind == RUN and not job.is_trained()]
    if not runs:
        return
    decoder = build_model(runs[0].recipe, runs[0].cfg).decoder
    a_model = disk_use(runs[0].cfg, decoder).epoch
    exports = sorted((num_exports(job.cfg) for job in runs), reverse=True)
    number = sum(exports)
    if grid.keep != "all":
        number = len(runs) + sum(each - 1 for each in exports[:num_parallel])
    free = shutil.disk_usage(existing_part(grid.out)).free
    if number * a_model > free:
        raise UserError(
            f"out={grid.out} has {gigabytes(free)} free, the {number} models of {len(runs)} cells need {gigabytes(number * a_model)}; "
            + ("keep: best in the grid keeps one of each cell, " if grid.keep == "all" else "")
            + "--out gives another disk"
        )


def _print_cells(grid: Grid, jobs: Sequence[Job]) -> None:
    """A table of the cells and what is left to do, then the first commands."""
    width = max(len(job.cell.name) for job in jobs)
    print(f"{'cell':<{width}}  training   evaluation  FINCH at its cap")
    commands: list[list[str]] = []
    for job in jobs:
        is_trained = job.is_trained() and not grid.overwrites
        evaluations = job.evaluate_commands()
        training = "done" if is_trained else "select-lr" if job.cell.kind == SMALL_LR else "to do"
        evaluation = "none" if grid.evaluation is None else "to do" if evaluations else "done"
        print(f"{job.cell.name:<{width}}  {training:<9}  {evaluation:<10}  {_at_cap(job)}".rstrip())
        if not commands:
            commands = [*([job.run_command()] if training == "to do" else []), *evaluations]
    for command in commands:
        print(f"\n{shlex.join(command)}")


def _at_cap(job: Job) -> str:
    """In which share of the steps FINCH was at its cap; before the first one, below which loss it will be; empty for another schedule."""
    from finch.training.config_checks import describe_cap

    if "lr_scheduler.log" in job.cell.values:  # it may not be there yet
        return ""
    metrics = job.cell.folder / run_files.METRICS
    share = run_files.capped_share(run_files.read_metrics(metrics)) if metrics.exists() else None
    return describe_cap(job.cfg) if share is None else f"{share:.0%} of steps"


def _ranks(args: argparse.Namespace) -> tuple[list[str], int]:
    """Options of `finch run`, and the number of ranks that they start."""
    if args.nproc_per_node is None:
        return [], 1
    given = argparse.Namespace(nnodes="1", nproc_per_node=args.nproc_per_node)
    return ["--nproc_per_node", args.nproc_per_node], number_of_ranks(given)[1]


def compose(
    grid: Grid, cells: Sequence[Cell], *, launcher: Sequence[str] = (), is_here: bool = True, num_ranks: int | None = 1
) -> list[Job]:
    """The jobs of cells, with complete and checked configs; warns of cells without validation rows.

    Args:
        launcher: options of `finch run` that start a run's ranks.
        is_here: whether they run on this machine.
        num_ranks: of a run. None: not known.

    Raises:
        UserError: the first wrong cell, and what is wrong.
    """
    from omegaconf import OmegaConf

    from finch.config.schema import affecting

    jobs: dict[Path, Job] = {}
    with only_errors_logged():
        for cell in cells:
            try:
                if cell.kind == RUN:
                    jobs[cell.folder] = _compose(grid, cell, launcher, is_here, num_ranks)
                else:  # made of a run of the grid
                    jobs[cell.folder] = replace(jobs[cell.dependencies[0]], cell=cell)
            except UserError as error:
                raise UserError(f"cell {cell.name}: {error}") from error
    if names := [job.cell.name for job in jobs.values() if _AUTO_CAP in job.cell.adapted]:
        logger.warning(
            f"{len(names)} of {len(jobs)} cells have a rate above the config's eta_max, such as {names[0]}: they train with "
            "lr_scheduler.eta_max=auto, 2.5 x optimizer.lr; a grid that names eta_max keeps its own"
        )
    if names := [job.cell.name for job in jobs.values() if _NO_AVERAGE in job.cell.adapted and job.cell.kind == RUN]:
        logger.warning(
            f"{len(names)} of {len(jobs)} cells are compared before their average, such as {names[0]}: they train with {_NO_AVERAGE}; "
            "method: wise_ft+METHOD adds the average as another cell"
        )
    averages = [job.cell.name for job in jobs.values() if job.cell.kind == WISE_FT]
    if averages and grid.evaluation is None:
        logger.warning(
            f"{len(averages)} of {len(jobs)} cells are averages, such as {averages[0]}, which only an evaluation measures; give the grid the block evaluate"
        )
    names = [job.cell.name for job in jobs.values() if not job.has_validation]
    if names:
        logger.warning(
            f"{len(names)} of {len(jobs)} cells have no validation rows, such as {names[0]}: their last epoch is evaluated, where the paper chooses an "
            "epoch by validation; set dataset_validation"
        )
    runs, left_out = [job for job in jobs.values() if job.cell.kind == RUN], affecting("place")
    # Plain containers: to compare omegaconf's takes milliseconds each.
    configs: list[Any] = [OmegaConf.to_container(job.cfg, resolve=True) for job in runs]
    trained = [{key: value for key, value in config.items() if key not in left_out} for config in configs]
    for config in trained:  # torchtune's block repeats the cell's own folder
        config["checkpointer"] = {**config["checkpointer"], "output_dir": None}
    for job, keys in zip(runs, trained, strict=True):
        first = runs[trained.index(keys)].cell.name
        if first != job.cell.name:
            raise UserError(f"cells {first} and {job.cell.name} are the same run; leave one out of the grid")
    return list(jobs.values())


def _compose(grid: Grid, cell: Cell, launcher: Sequence[str], is_here: bool, num_ranks: int | None) -> Job:
    words = run_words(grid, cell)[1:]
    recipe, cfg = read_job(grid.config, words, is_here=is_here)
    check_method(grid, cell, cfg)
    from finch.training.config_checks import check_schedule  # after the first look, which does not import torch

    is_named = any(word.startswith("lr_scheduler.eta_max=") for word in words)
    has_rate = any(word.startswith("optimizer.lr=") for word in words)
    has_log = cell.source is None or (cell.source / run_files.METRICS).exists()  # lr_replay's
    # Else the cell would train at the constant rate of its cap, as one of another method.
    adapted = [_AUTO_CAP] if has_rate and not is_named and has_log and check_schedule(cfg) else []
    # The evaluation and the report have the run's own model: an average would be made, and compared nowhere.
    adapted += [_NO_AVERAGE] if cfg.average is not None else []
    if adapted:
        cell = replace(cell, adapted=tuple(adapted))
        recipe, cfg = read_job(grid.config, run_words(grid, cell)[1:], is_here=is_here)
    if grid.recipe is not None and recipe != grid.recipe:
        raise UserError(f"recipe={grid.recipe} does not train its model, {recipe} does; leave recipe out of the grid")
    if has_log:
        for check in config_checks(cfg, num_ranks):
            check()
    if is_here:
        for check in machine_checks(recipe, cfg, num_ranks or 1, waits=True):
            check()
    job = Job(grid, replace(cell, rows=row_hashes(cfg)), recipe, cfg, launcher)
    if job.select_by is not None and (cfg.save_last_epoch_only or cfg.save_best_only):
        key = "save_last_epoch_only" if cfg.save_last_epoch_only else "save_best_only"
        raise UserError(
            f"{key}=True leaves no epochs to choose from by evaluate.select_by; set it to False, and keep: best in the grid"
        )
    if not grid.overwrites and (different := different_key(cell.folder, cfg)):
        key, saved, given = different
        raise UserError(
            f"{cell.folder} holds a run with {key}={_short(saved)}, the grid says {_short(given)}; give another out, or overwrite=True"
        )
    if not grid.overwrites and job.has_lost_epochs():
        raise UserError(
            f"evaluate.select_by={job.select_by}: {cell.folder} has only the epoch that validation loss chose; leave it out, give another out, or overwrite=True"
        )
    return job


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _submit_sweep(grid: Grid, options: Sequence[str], words: Sequence[str], args: argparse.Namespace) -> None:
    """Submits the cells that are neither trained nor in Slurm's queue: an array, a second one of the cells that need runs of the first, and a job
    that makes WiSE-FT's models and evaluates. Prints the jobs' ids, or in a dry run the commands.

    Args:
        options: sbatch's.
        words: GRID and its overrides, as given.
    """
    if grid.overwrites:
        raise UserError(
            "overwrite=True: a job that is requeued would start from scratch again; remove the cells' folders, or give another --out"
        )
    scripts = [read_script(name) for name in (SCRIPT, SWEEP_SCRIPT)]
    job_options = complete_options(options, "\n".join(text for _, text in scripts))
    jobs = compose(grid, cells_of(grid), is_here=False, num_ranks=job_options.num_ranks)
    for key in ("data_root", "include_path"):
        path = None if grid.evaluation is None else getattr(grid.evaluation, key)
        if path is not None and not Path(path).is_dir():
            logger.warning(
                f"evaluate.{key}={path} is no folder on this machine; the evaluation, after all runs, needs it on its node"
            )
    submission = _Submission(grid, job_options, [path for path, _ in scripts], is_dry_run=args.dry_run)
    queued = submission.queued()
    left = {
        job.cell.folder: job
        for job in jobs
        if not args.skip_training and job.cell.kind == RUN and not job.is_trained() and job.cell.name not in queued
    }
    first = [job for job in left.values() if job.cell.source not in left]
    second = [job for job in left.values() if job.cell.source in left]
    earlier = sorted(set(queued.values()), key=lambda number: (len(number), number))  # 9 before 10
    trained_earlier = sorted({job for name, job in queued.items() if name != _EVALUATION})
    ids: list[str] = []
    for group in filter(None, (first, second)):
        ids.append(submission.submit_array(group, args.jobs, after=[*trained_earlier, *ids]))
    has_models = grid.evaluation is not None or any(job.cell.kind != RUN for job in jobs)
    # An evaluation that is queued does not wait for these cells. Where none is trained, what is left to evaluate is looked up.
    is_queued = not ids and _EVALUATION in queued
    if has_models and not is_queued and (ids or any(not job.is_trained() or job.evaluate_commands() for job in jobs)):
        ids.append(submission.submit_evaluation(words, after=[*earlier, *ids]))
    if queued:
        print(f"in Slurm's queue already: {', '.join(earlier)}")
    if not ids:
        print(f"all {len(jobs)} cells are done or in the queue; there is nothing to submit")
    elif not args.dry_run:
        print(f"{len(left)} of {len(jobs)} cells to train in {grid.out}")
        print(f"  squeue --jobs {','.join(ids)}")
        print(f"  tail -F {shlex.quote(str(submission.folder))}/*.out")
        print(f"  scancel {' '.join(ids)}    # saves and ends the jobs; the same command continues the sweep")


class _Submission:
    """OUT/slurm: the scripts as they were when the jobs were submitted, the files of cells, and the jobs' output."""

    def __init__(self, grid: Grid, options: JobOptions, scripts: Sequence[Path], *, is_dry_run: bool) -> None:
        self._grid, self._options, self._is_dry_run = grid, options, is_dry_run
        self.folder = grid.out / "slurm"
        files_of_cells = (self.folder / f"cells_{number}" for number in itertools.count())
        self._free = (file for file in files_of_cells if not file.exists())
        files = [Path(absolute(name)).parent for name in (grid.config, str(grid.path)) if Path(name).is_file()]
        mounts = [options.settings.get("FINCH_CONTAINER_MOUNTS"), os.path.abspath(grid.out), *map(str, files)]
        if "FINCH_CONTAINER" in options.settings:  # the scripts mount the working directory and a run's own folder
            options.settings["FINCH_CONTAINER_MOUNTS"] = ",".join(dict.fromkeys(filter(None, mounts)))
        self._run_script, self._sweep_script = (self.folder / script.name for script in scripts)
        if not is_dry_run:
            with writing(f"out={grid.out}", "give another --out"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for script in scripts:
                    with atomic_file(self.folder / script.name) as partial:
                        shutil.copyfile(script, partial)

    def submit_array(self, jobs: Sequence[Job], max_parallel: int | None, *, after: Sequence[str]) -> str:
        """Returns the array's id."""
        lines = []
        for job in jobs:
            config, *overrides = run_words(self._grid, job.cell)
            lines.append(shlex.join([job.recipe, absolute(config), *overrides]) + "\n")
        cells = next(self._free)
        limit = "" if max_parallel is None else f"%{max_parallel}"
        words = [f"--array=0-{len(jobs) - 1}{limit}", *_dependency(after), f"--output={self.folder}/%A_%a.out"]
        command = [str(self._sweep_script), str(cells), str(self._run_script)]
        if self._is_dry_run:
            for index, line in enumerate(lines):
                print(f"# task {index} of {cells}: {line}", end="")
        else:
            replace_text(cells, "".join(lines))
            for job in jobs:
                write_cell(job.cell, task=self._grid.task, status=WAITING)
        return self._submit([*self._options.given, *words, *command], [job.cell.name for job in jobs])

    def submit_evaluation(self, words: Sequence[str], *, after: Sequence[str]) -> str:
        """Returns the job's id. The job has one node; as many evaluations run at a time as it has GPUs."""
        gpus = self._options.by_name.get("gpus-per-node", "1").rpartition(":")[2]
        options = ["--nodes=1", *_dependency(after), f"--output={self.folder}/%j.out"]
        arguments = [absolute(words[0]), *words[1:], "--out", str(self._grid.out)]
        arguments += ["--jobs", gpus if gpus.isdigit() and int(gpus) > 0 else "1"]
        return self._submit([*self._options.given, *options, str(self._sweep_script), *arguments], [_EVALUATION])

    def queued(self) -> dict[str, str]:
        """Of the cells, and the evaluation, that an earlier submission has in Slurm's queue, their job, the last one."""
        found: dict[str, str] = {}
        for file in sorted(self.folder.glob("*.job"), key=lambda file: file.stat().st_mtime_ns):
            names = json.loads(file.read_text(encoding="utf-8"))
            command = ["squeue", "--noheader", "--array", f"--jobs={file.stem}", "--format=%K"]
            # Without Slurm there is no squeue; of a job that it has forgotten, squeue prints an error and no task.
            with contextlib.suppress(FileNotFoundError):
                tasks = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
                found |= {names[int(task) if task.isdigit() else 0]: file.stem for task in tasks}
        return found

    def _submit(self, words: Sequence[str], names: Sequence[str]) -> str:
        command = ["sbatch", "--parsable", *words]
        if self._is_dry_run:
            print(as_shell(command, self._options.settings))
            return "JOB"
        number = run_sbatch(command, self._options.settings)
        write_text(self.folder / f"{number}.job", json.dumps(list(names)))
        return number


def _dependency(after: Sequence[str]) -> list[str]:
    """``afterany``: a cell that failed does not keep the others from being evaluated."""
    return [f"--dependency=afterany:{':'.join(after)}"] if after else []
