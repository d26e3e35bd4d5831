"""Which runs can be compared: of one model, one new task and one pretrained model, evaluated alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from finch.errors import UserError
from finch.evaluation.judge import answers_definition
from finch.evaluation.results import NEW, SuiteResult, base_path, read_result
from finch.report.runs import Run, base_builder


def check_models(runs: Sequence[Run]) -> None:
    """
    Raises:
        UserError: the runs' configs have different models.
    """
    builders = {base_builder(run.config): run for run in runs if run.config}
    if len(builders) > 1:
        (one, run), (other, other_run) = list(builders.items())[:2]
        raise UserError(
            f"model: {run.folder} has {one}, {other_run.folder} has {other}; their changes have no common base: report on one model at a time"
        )


def read_bases(runs: Sequence[Run], folder: Path | None) -> dict[str, SuiteResult]:
    """The pretrained model's results by suite.

    Args:
        folder: see ``base_file``.

    Raises:
        UserError: they are missing, of different weights, or of other settings than the runs'.
    """
    bases: dict[str, SuiteResult] = {}
    first: dict[str, tuple[Run, SuiteResult]] = {}
    weights: tuple[Run, str] | None = None
    for run in runs:
        for suite, result in run.results.items():
            other_run, other = first.setdefault(suite, (run, result))
            _check_settings(suite, (str(run.folder), result), (str(other_run.folder), other))
            if result.base is None:
                continue
            path = base_file(run, suite, folder)
            found = read_result(path)
            _check_settings(suite, (str(run.folder), result), (str(path.parent), found))
            weights = weights or (run, found.weights)
            if found.weights != weights[1]:
                raise UserError(
                    f"base: {weights[0].folder} and {run.folder} were compared with different pretrained weights ({weights[1][:12]} and "
                    f"{found.weights[:12]}); report on runs of one pretrained model at a time"
                )
            bases[suite] = found
    return bases


def base_file(run: Run, suite: str, folder: Path | None) -> Path:
    """The pretrained model's JSON that a run's was compared with.

    Args:
        folder: of the pretrained model's results, or the folder it is in, where it has been moved.

    Raises:
        UserError: the file does not exist.
    """
    path = base_path(run.result_path(suite), run.results[suite])
    assert path is not None
    if folder is not None:
        candidates = [folder / path.name, folder / path.parent.name / path.name]
        path = next((one for one in candidates if one.exists()), path)
    if not path.exists():
        raise UserError(
            f"{path} does not exist: the pretrained model's results that {run.folder} was compared with; give their folder by --base"
        )
    return path


def _check_settings(suite: str, one: tuple[str, SuiteResult], other: tuple[str, SuiteResult]) -> None:
    (name, result), (other_name, other_result) = one, other
    # Where the data lie may differ: the documents' hashes have to be the same.
    for key in sorted((result.settings.keys() | other_result.settings.keys()) - {"data"}):
        value, other_value = result.settings.get(key), other_result.settings.get(key)
        if value != other_value:
            raise UserError(
                f"{suite}: {name} was evaluated with {key}={value}, {other_name} with {key}={other_value}; evaluate both alike"
            )
    for task in result.tasks.keys() & other_result.tasks.keys():
        definition, other_definition = result.tasks[task].definition, other_result.tasks[task].definition
        if result.is_base != other_result.is_base:  # the base model's answers are not judged
            definition, other_definition = answers_definition(definition), answers_definition(other_definition)
        if definition != other_definition:
            raise UserError(
                f"{suite}: {task} has another definition in {name} than in {other_name} (such as a chat template in one of them); "
                "evaluate both alike"
            )


def find_new_task(runs: Sequence[Run], new_task: str | None, probes: Sequence[str] = ()) -> str | None:
    """The name of the evaluated task that the runs learned; None: no run has one.

    Args:
        probes: names of probes that can be the new task too.

    Raises:
        UserError: the runs learned different tasks, or it is not known which of several.
    """
    of_run = {
        str(run.folder): {
            name for result in run.results.values() for name, task in result.tasks.items() if task.role == NEW
        }
        for run in runs
    }
    known = set().union(*of_run.values())
    if new_task is not None:
        every = {name for run in runs for result in run.results.values() for name in result.tasks}
        if new_task not in every:
            raise UserError(
                f"--new-task={new_task} was not evaluated; evaluated are {', '.join(sorted(every)) or 'no tasks'}"
                + (f", probes are {', '.join(sorted(probes))}" if probes else "")
            )
        return new_task
    grids = {run.task: run for run in runs if run.task is not None}
    if len(grids) > 1:
        (one, run), (other, other_run) = list(grids.items())[:2]
        raise UserError(
            f"{run.folder} learned {one}, {other_run.folder} learned {other}; report on runs of one task at a time, or name what they share by --new-task"
        )
    learned = {
        name
        for run in runs
        for suite, result in run.results.items()
        for name, task in result.tasks.items()
        if task.role == NEW and not grids.keys().isdisjoint((suite, name))
    }
    if len(learned) == 1:
        return learned.pop()
    if len(known) <= 1:
        if not known:
            _check_training_data(runs)
        return next(iter(known), None)
    evaluated = {folder: names for folder, names in of_run.items() if names}
    shared = set.intersection(*evaluated.values())
    if len(shared) == 1:
        return shared.pop()
    if shared:
        raise UserError(
            f"the runs were evaluated on several new tasks: {', '.join(sorted(shared))}; choose one by --new-task"
        )
    folders = list(evaluated)
    other_folder = next(folder for folder in folders if evaluated[folder] != evaluated[folders[0]])
    raise UserError(
        f"{folders[0]} was evaluated on {', '.join(sorted(evaluated[folders[0]]))}, {other_folder} on {', '.join(sorted(evaluated[other_folder]))}: "
        "different new tasks; report on runs of one task at a time"
    )


def _check_training_data(runs: Sequence[Run]) -> None:
    """Where nothing names the new task: probes marked ``task: True``, else the training data, have to be the same."""
    marks = {tuple(task_probes(run)): run for run in runs if task_probes(run)}
    if len(marks) > 1:
        (one, run), (other, other_run) = list(marks.items())[:2]
        raise UserError(
            f"probes: the new task of {run.folder} is {', '.join(one)}, of {other_run.folder} {', '.join(other)}; report on runs of one task at a time"
        )
    if marks:
        return
    files: dict[str, Run] = {}
    for run in runs:
        dataset = run.config.get("dataset")
        if isinstance(dataset, Mapping):
            source = dataset.get("data_files") or dataset.get("source") or dataset.get("_component_")
            files.setdefault(str(source), run)
    if len(files) > 1:
        (one_file, run), (other_file, other_run) = list(files.items())[:2]
        raise UserError(
            f"dataset: {run.folder} learned {one_file}, {other_run.folder} learned {other_file}; report on runs of one task at a time"
        )


def task_probes(run: Run) -> list[str]:
    """The run's probes that are marked ``task: True``."""
    probes = run.config.get("probes")
    return [name for name, block in probes.items() if (block or {}).get("task")] if isinstance(probes, Mapping) else []
