"""Evaluates the pretrained and the tuned models on tasks: what is left to do, lm-eval on each task, results as files.

A task is one call of lm-eval, with the chat template or without as the task says. Its result is written when it ends; within a task
the answers are kept (``language_model.AnswerCache``), so that an interruption costs a batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import finch
from finch.base.errors import UserError
from finch.base.log import logger
from finch.distributed.parallel import Parallel
from finch.evaluation.harness import Harness
from finch.evaluation.judge import answers_definition
from finch.evaluation.loading import SHORT, hash_prompts, hash_values, hash_weights, load_model
from finch.evaluation.model_folders import ModelFolder, training_questions
from finch.evaluation.progress import EvaluationProgress
from finch.evaluation.results import Sample, SuiteResult, TaskResult, base_path, read_result, read_samples, write_result
from finch.evaluation.tasks.task import Task, scored

_PACKAGES = ("lm_eval", "torch", "transformers")
"""Whose versions may change numbers."""


@dataclass(frozen=True)
class Options:
    """How models are evaluated.

    Attributes:
        out: where results are written, except those of runs.
        data_root: folder of local data sets; None: the hub.
        limit: documents per task; None: all.
        dtype: a key of ``finch.evaluation.loading.DTYPES``.
        batch_size: rows, or ``auto``.
        trust: the tuned runs are the user's own, see :func:`finch.evaluation.foreign.read_config_of`.
    """

    out: Path
    data_root: Path | None = None
    limit: int | None = None
    dtype: str = "fp32"
    batch_size: int | str = "auto"
    trust: bool = False


@dataclass(frozen=True)
class Target:
    """A model, the hash of its weights, and the folder of its results."""

    folder: ModelFolder
    weights: str
    output: Path


class Evaluation:
    """The pretrained and the tuned models, in this order, on tasks, whose data ``harness`` has loaded."""

    def __init__(
        self, folders: Sequence[ModelFolder], tasks: Sequence[Task], harness: Harness, options: Options, ranks: Parallel
    ) -> None:
        self._tasks, self._harness, self._options, self._ranks = tasks, harness, options, ranks
        self.settings: dict[str, str | int | float | bool | None] = {
            "dtype": options.dtype,
            "limit": options.limit,
            "data": "hub" if options.data_root is None else str(options.data_root.resolve()),
            "prompt": "chat template" if harness.has_chat_template else "plain prompt",
            "tokenizer": hash_prompts(harness.tokenizer)[:SHORT],
        }
        hashes = self._of_first(lambda: [hash_weights(folder) for folder in folders])
        self.targets = [
            Target(folder, weights, folder.output(options.out, hash_values(weights, self.settings)[:SHORT]))
            for folder, weights in zip(folders, hashes, strict=True)
        ]

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(task.suite for task in self._tasks))

    def run(self) -> None:
        """Evaluates what no result file has yet."""
        todo = [(target, self._missing(target)) for target in self.targets]
        estimates = [self._harness.num_requests(task) for _, tasks in todo for task in tasks]
        progress = EvaluationProgress(estimates, is_shown=self._ranks.is_rank_zero)
        try:
            for target, tasks in todo:
                if tasks or self._of_first(functools.partial(self._renewed, target)):
                    with self._locked(target) as has_waited:
                        for result in self._renewed(target) if self._ranks.is_rank_zero else ():
                            write_result(self._place(target), result, self._unjudged(target, result))
                        tasks = self._missing(target) if has_waited else tasks
                        if tasks:
                            self._evaluate(target, tasks, progress)
        finally:
            progress.close()

    @contextlib.contextmanager
    def _locked(self, target: Target) -> Iterator[bool]:
        """One evaluation at a time writes into a folder, by rank 0's lock, which ends with its process; yields whether this one has waited."""
        has_waited = False
        with contextlib.ExitStack() as stack:
            if self._ranks.is_rank_zero:
                target.folder.make_place(target.output, self._options.out, trust=self._options.trust)
                lock = FileLock(target.output / ".lock", fallback_to_soft=False)
                with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
                    try:
                        lock.acquire(timeout=0)
                    except Timeout:
                        logger.info(f"another finch evaluate writes into {target.output}; this one waits for it")
                        has_waited = True
                        lock.acquire()
                    stack.callback(lock.release)
            yield self._of_first(lambda: has_waited)

    def _of_first(self, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, on all ranks."""
        return self._ranks.gather_all_ranks(find() if self._ranks.is_rank_zero else None)[0]

    def result(self, target: Target, suite: str) -> SuiteResult:
        return read_result(target.output / f"{suite}.json")

    def _missing(self, target: Target) -> list[Task]:
        """The tasks without a result of this model with these settings, as rank 0 finds them."""
        names = self._of_first(lambda: self._find_missing(target))
        return [task for task in self._tasks if task.name in names]

    def _find_missing(self, target: Target) -> list[str]:
        """Their names; a log line says what is reused."""
        missing: list[str] = []
        for suite in self.suites:
            tasks = [task for task in self._tasks if task.suite == suite]
            done = self._usable(target, suite)
            path = target.output / f"{suite}.json"
            if done is None and path.exists():
                logger.info(f"{path} is {self._difference(target, read_result(path))} and will be replaced")
            reused = [task.name for task in tasks if done is not None and self._is_done(task, target, done)]
            if reused:
                logger.info(f"{path} is reused: {', '.join(reused)}")
            for name in reused:
                self._remove_answers(target, suite, name)
            missing += [task.name for task in tasks if task.name not in reused]
        return missing

    def _renewed(self, target: Target) -> list[SuiteResult]:
        """Results that stay, but for what their scores are compared with and stand for, which may be others by now."""
        found = []
        for suite in self.suites:
            if (done := self._usable(target, suite)) is None:
                continue
            roles = {task.name: task.role for task in self._tasks if task.name in done.tasks}
            tasks = {name: replace(task, role=roles.get(name, task.role)) for name, task in done.tasks.items()}
            if not self._has_base(target, suite, done):  # a judge has compared with another one
                for name, task in tasks.items():
                    if (definition := answers_definition(task.definition)) != task.definition:
                        tasks[name] = replace(task, definition=definition, score=None, n=0, others={})
            renewed = replace(done, base=self._base(target, suite), tasks=tasks)
            found += [renewed] if renewed != done else []
        return found

    def _has_base(self, target: Target, suite: str, done: SuiteResult) -> bool:
        """Whether a result names this pretrained model's, or is of that model itself."""
        file = base_path(target.output / f"{suite}.json", done)
        return file is None or (file.is_file() and read_result(file).weights == self.targets[0].weights)

    @staticmethod
    def _unjudged(target: Target, result: SuiteResult) -> dict[str, list[Sample]]:
        """The samples of tasks whose score does not count any more, without theirs; a judge's verdicts are kept elsewhere, by the texts."""
        return {
            name: [{**sample, "score": None, "verdicts": None} for sample in read_samples(target.output, task)]
            for name, task in result.tasks.items()
            if task.score is None and (target.output / task.samples).is_file()
        }

    def _usable(self, target: Target, suite: str) -> SuiteResult | None:
        """The suite's earlier result, if it is of these weights and settings."""
        path = target.output / f"{suite}.json"
        result = read_result(path) if path.exists() else None
        return None if result is None or self._difference(target, result) else result

    def _difference(self, target: Target, result: SuiteResult) -> str | None:
        """Why a result cannot be used; None: it can."""
        if result.weights != target.weights:
            return "of other weights"
        one, other = result.settings, self.settings
        key = next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
        return None if key is None else f"with {key}={one.get(key)} in place of {other.get(key)}"

    def _is_done(self, task: Task, target: Target, result: SuiteResult) -> bool:
        """Whether a result is of the task as it is now, and of its local rows as they are now."""
        done = result.tasks.get(task.name)
        if done is None or answers_definition(done.definition) != task.definition(self._harness.has_chat_template):
            return False
        return (target.output / done.samples).is_file() and done.rows == self._rows_of(task)

    def _rows_of(self, task: Task) -> str | None:
        root = self._options.data_root
        return None if root is None else task.hash_rows(root)

    def _evaluate(self, target: Target, tasks: Sequence[Task], progress: EvaluationProgress) -> None:
        from finch.evaluation.language_model import AnswerCache, LanguageModel

        run = target.folder.run
        trust, is_first = self._options.trust, self._ranks.is_rank_zero
        questions = training_questions(run, trust=trust) if run is not None and is_first else None
        progress.set_title(f"{target.folder.label}: loading")
        model = LanguageModel(
            load_model(target.folder, self._options.dtype, self._ranks.device),
            self._harness.tokenizer,
            name=str(target.folder),
            batch_size=self._options.batch_size,
            ranks=self._ranks,
            progress=progress,
        )
        for task in tasks:
            progress.start_task(f"{target.folder.label}: {task.name}")
            definition = task.definition(self._harness.has_chat_template)
            number = f".rank{self._ranks.rank}of{self._ranks.world_size}" if self._ranks.world_size > 1 else ""
            answers = target.output / f"{task.suite}.{task.name}.answers{number}.jsonl"
            cache = AnswerCache(answers, hash_values(target.weights, self.settings, definition))
            if cache.num_read:
                logger.info(f"{target.folder.label}: {task.name} continues after {cache.num_read} batches")
            model.answer_cache = cache
            with contextlib.closing(cache):
                records = self._harness.evaluate(model, task)
                if records is not None:
                    self._write(target, task, definition, task.samples(records, questions))
            self._ranks.gather_all_ranks(None)
            if self._ranks.is_rank_zero:  # of all ranks, and of an earlier start with another number of them
                self._remove_answers(target, task.suite, task.name)

    def _remove_answers(self, target: Target, suite: str, name: str) -> None:
        for path in target.output.glob(f"{suite}.{name}.answers*.jsonl"):
            (self._place(target) / path.name).unlink(missing_ok=True)

    def _place(self, target: Target) -> Path:
        """The folder of a model's results, to write there."""
        return target.folder.place(target.output, self._options.out, trust=self._options.trust)

    def _base(self, target: Target, suite: str) -> str | None:
        """The pretrained model's result, relative to the target's; None of that model itself."""
        if target.folder.option == "--base":
            return None
        return os.path.relpath(self.targets[0].output / f"{suite}.json", target.output)

    def _write(self, target: Target, task: Task, definition: str, samples: list[dict[str, Any]]) -> None:
        result = TaskResult(
            role=task.role,
            metric=task.metric,
            definition=definition,
            **scored(samples),
            samples=f"{task.suite}.{task.name}.jsonl",
            chance=task.chance,
            is_higher_better=task.is_higher_better,
            others=task.others(samples),
            rows=self._rows_of(task),
        )
        earlier = self._usable(target, task.suite)
        suite = SuiteResult(
            suite=task.suite,
            model=str(target.folder.path.resolve()),
            weights=target.weights,
            is_base=target.folder.option == "--base",
            base=self._base(target, task.suite),
            settings=self.settings,
            versions={"finch": finch.__version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}},
            tasks={**({} if earlier is None else earlier.tasks), task.name: result},
        )
        try:
            write_result(target.output, suite, {task.name: samples})
        except ValueError as error:  # NaN or infinity, which JSON cannot hold
            raise UserError(
                f"{target.folder}: task {task.name} has a result that is not finite ({error}); nothing is written"
            ) from error
