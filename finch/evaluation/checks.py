"""What can be known before any weights are loaded: the installed harness, names of suites and tasks, data, tokenizers."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from finch.config.instantiate import did_you_mean
from finch.errors import UserError
from finch.evaluation.tasks.registry import ALL, SUITES, TASKS

if TYPE_CHECKING:
    from finch.evaluation.model_folders import ModelFolder
    from finch.evaluation.tasks.task import Task

HARNESS = SpecifierSet(">=0.4.13,<0.5")
PUNKT = "python -c \"import nltk; nltk.download('punkt_tab')\""
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def check_harness() -> None:
    """
    Raises:
        UserError: lm-eval's version is outside of the tested range.
    """
    installed = importlib.metadata.version("lm-eval")
    if installed not in HARNESS:
        raise UserError(
            f"lm-eval {installed} is installed; finch evaluate needs lm-eval{HARNESS}: pip install 'lm-eval{HARNESS}'"
        )


def select_tasks(suites: Sequence[str], names: Sequence[str]) -> tuple[list[Task], list[str]]:
    """The tasks of finch, and the names of those that only lm-eval can have.

    Args:
        suites: names of suites, or ``all``; empty: each task belongs to its own.
        names: of tasks; empty: all tasks of the suites. With suites, they are chosen from these.

    Raises:
        UserError: no or an unknown suite, or a task that none of the suites has.
    """
    if not suites and not names:
        raise UserError(f"--suite is missing; give one of {', '.join(ALL)}, all, or --tasks")
    chosen: list[str] = []
    for suite in suites:
        if suite != "all" and suite not in SUITES:
            known = [*SUITES, "all"]
            hint = did_you_mean(suite, known) or f"; there are {', '.join(known)}"
            raise UserError(f"--suite={suite} is unknown{hint}")
        chosen += ALL if suite == "all" else [suite]
    of_suites = [task for suite in dict.fromkeys(chosen) for task in SUITES.get(suite, ())]
    if not names:
        return [TASKS[name] for name in of_suites], []
    if suites:
        for name in names:
            if name not in of_suites:
                hint = did_you_mean(name, of_suites) or f": it has {', '.join(of_suites)}"
                raise UserError(
                    f"--tasks {name} is not in --suite {','.join(suites)}{hint}; without --suite any task can be given"
                )
    names = list(dict.fromkeys(names))
    return [TASKS[name] for name in names if name in TASKS], [name for name in names if name not in TASKS]


def check_data(tasks: Sequence[Task], data_root: Path | None) -> None:
    """
    Args:
        tasks: of finch.
        data_root: None: the hub.

    Raises:
        UserError: a file is missing, or the hub may not be used.
    """
    if data_root is not None and not data_root.is_dir():
        raise UserError(
            f"--data-root={data_root} is not a folder; give the folder of the data sets, or leave it out to use the hub"
        )
    for name in _OFFLINE if data_root is None and tasks else ():
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            raise UserError(
                f"--data-root is missing and {name}={os.environ[name]} forbids the hub; give --data-root DIR"
            )
    for task in tasks:
        task.check_data(data_root)
    if any(task.name == "ifeval" for task in tasks):
        _check_punkt()


def check_tokenizers(base: ModelFolder, tuned: Sequence[ModelFolder]) -> None:
    """
    Raises:
        UserError: a tuned model's tokenizer has other tokens than the base's.
    """
    from finch.evaluation.loading import hash_vocabulary, load_tokenizer

    expected = None
    for folder in tuned:
        if folder.is_adapter:  # it answers with the base's tokenizer
            continue
        expected = expected or hash_vocabulary(load_tokenizer(base.path, "--base"))
        if hash_vocabulary(load_tokenizer(folder.path, "--tuned")) != expected:
            raise UserError(f"{folder} has another vocabulary than {base}; give the model that was tuned as --base")


def _check_punkt() -> None:
    """lm-eval would report a download that failed as done, and stop in the middle of IFEval."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise UserError(f"ifeval: NLTK's punkt_tab is missing; fetch it: {PUNKT}, or set NLTK_DATA") from error
