"""What a sweep does for a cell: the commands of its run and of its evaluation, and what its folder says about both."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.base import run_files
from finch.base.errors import UserError
from finch.base.files import atomic_file
from finch.config.methods import apply_method
from finch.evaluation.results import read_result, read_samples, write_result
from finch.evaluation.tasks.registry import SUITES, TASKS
from finch.study.report.runs import method_of_config
from finch.study.sweep.grid import (
    ALPHA,
    DEFAULT_ALPHA,
    EVALUATED,
    FINISHED,
    LABEL,
    LR,
    METHOD,
    RUN,
    SMALL_LR,
    WISE_FT,
    Cell,
    Evaluation,
    Grid,
    read_cell,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

FINCH = (sys.executable, "-P", "-m", "finch.cli")
_LINKED = (run_files.CONFIG, run_files.METRICS, run_files.BEST, run_files.EVALUATION)


@dataclass(frozen=True)
class Job:
    """A cell with its checked config.

    Attributes:
        cfg: the complete config. WiSE-FT's and small_lr's is that of the run that they depend on.
        launcher: options of `finch run` that start the run's ranks.
    """

    grid: Grid
    cell: Cell
    recipe: str
    cfg: DictConfig
    launcher: Sequence[str] = ()

    @property
    def evaluation(self) -> Evaluation:
        """The grid's, where it has one."""
        assert self.grid.evaluation is not None
        return self.grid.evaluation

    @property
    def pretrained(self) -> str:
        return str(self.cfg.checkpointer.checkpoint_dir)

    @property
    def alpha(self) -> float:
        return float(self.cell.values.get(ALPHA, DEFAULT_ALPHA))

    @property
    def has_validation(self) -> bool:
        """Whether the checkpoint is chosen by validation. Without, it is the last epoch's."""
        return self.cfg.dataset_validation is not None or self.cfg.select_by is not None or self.select_by is not None

    @property
    def select_by(self) -> str | None:
        """The suite that the sweep scores each epoch on, to choose ``best`` (the paper, Section 4.1); None: the run has chosen."""
        evaluation = self.grid.evaluation
        return None if evaluation is None or self.cell.kind != RUN else evaluation.select_by

    def is_selected(self) -> bool:
        """Whether nothing is missing to choose the trained run's model."""
        epochs = self._epochs()
        return self.select_by is None or (bool(epochs) and all(self._is_scored(epoch) for epoch in epochs))

    def select_epoch(self) -> None:
        """Links ``best`` to the epoch with the best score on ``select_by``, of equal ones to the first, and makes its result the run's.

        Depends only on the epochs that are there and on their results, so that it can be repeated after an interruption.
        """
        run, suite = self.cell.folder, self.select_by
        if suite is None or not self.is_selected():
            return
        [task] = SUITES[suite]

        def score(epoch: Path) -> float:
            result = read_result(_result_path(run, suite, epoch.name)).tasks[task]
            value = -math.inf if result.score is None else result.score
            return value if result.is_higher_better else -value

        best = max(self._epochs(), key=score)
        _link(run / run_files.BEST, Path(best.name))
        if suite in self._missing_results():
            own, path = _result_path(run, suite), _result_path(run, suite, best.name)
            result = read_result(path)
            base = None if result.base is None else os.path.relpath(path.parent / result.base, own.parent)
            samples = {task: read_samples(path.parent, result.tasks[task])}
            write_result(own.parent, replace(result, base=base, tasks={task: result.tasks[task]}), samples)

    def _epochs(self) -> list[Path]:
        """The models of the epochs that are there, the first epoch's first; a complete model rather than its adapter."""
        folders = sorted(run_files.epoch_folders(self.cell.folder).items())
        return list({number: path for (number, _), path in folders}.values())

    def has_lost_epochs(self) -> bool:
        """Whether epochs to choose from are gone, which ``keep`` has removed before any was scored."""
        run, metrics = self.cell.folder, self.cell.folder / run_files.METRICS
        if self.select_by is None or not metrics.exists() or (run / run_files.CHECKPOINTS).exists():
            return False
        last = max((line.get("epoch", 0) for line in run_files.read_metrics(metrics)), default=0)
        is_scored = any((run / run_files.EVALUATION).glob(f"epoch_*/{self.select_by}.json"))
        return len(self._epochs()) == 1 <= last and not is_scored and self.is_trained()

    def _missing_results(self) -> list[str]:
        return missing_results(self.cell.folder, self.evaluation, base=self.evaluation.base or self.pretrained)

    def _is_scored(self, epoch: Path) -> bool:
        suite = str(self.select_by)
        path = _result_path(self.cell.folder, suite, epoch.name)
        return _is_result(path, set(SUITES[suite]), self.evaluation, _written(epoch))

    def is_trained(self) -> bool:
        run = self.cell.folder
        if self.cell.kind == SMALL_LR:
            return (run / run_files.BEST).exists()
        if self.cell.kind == WISE_FT:
            own = run / f"alpha_{self.alpha:g}"
            is_older = own.exists() and _chosen_at(self.cell.dependencies[0]) > own.stat().st_mtime
            return (run / run_files.BEST).exists() and not is_older
        return is_trained(run, self.cfg)

    def run_command(self) -> list[str]:
        """Trains the cell, or makes WiSE-FT's model."""
        if self.cell.kind == WISE_FT:
            [source] = self.cell.dependencies
            tuned = run_files.chosen_model(source) or source / run_files.BEST
            options = ["--base", self.pretrained, "--tuned", str(tuned), "--alpha", f"{self.alpha:g}"]
            return [*FINCH, "average", *options, "--out", str(self.cell.folder)]
        return [*FINCH, "run", *self.launcher, *run_words(self.grid, self.cell)]

    def evaluate_commands(self) -> list[list[str]]:
        """`finch evaluate` where results are missing: of the epochs, if the model is not chosen yet, then of the model."""
        evaluation, run = self.grid.evaluation, self.cell.folder
        if evaluation is None:
            return []
        commands = []
        if not self.is_selected():
            epochs = self._epochs() or [run / f"epoch_{number}" for number in range(self.cfg.epochs)]
            commands.append(self._evaluate(epochs, suite=self.select_by))
        if self._missing_results():
            names = {"suite": ",".join(evaluation.suites) or None, "tasks": ",".join(evaluation.tasks) or None}
            own = {"include_path": evaluation.include_path, "new_task": evaluation.new_task}
            commands.append(self._evaluate([run], **names, **own))
        return commands

    def _evaluate(self, models: Sequence[Path], **options: str | None) -> list[str]:
        """With an option, such as ``--data-root DATA``, of each value that is set."""
        evaluation = self.evaluation
        every = {"data_root": evaluation.data_root, "limit": evaluation.limit, **options}
        given = {f"--{name.replace('_', '-')}": str(value) for name, value in every.items() if value is not None}
        command = [*FINCH, "evaluate", "--base", evaluation.base or self.pretrained, "--tuned", *map(str, models)]
        return [*command, "--out", str(self.grid.out), "--trust", *(word for pair in given.items() for word in pair)]

    def end_evaluation(self, *, of_epochs: bool = False) -> None:
        """Marks the results as new: `finch evaluate` leaves a result as it is where the model's weights are those that it was made with."""
        run = self.cell.folder
        if of_epochs:
            paths = [_result_path(run, str(self.select_by), epoch.name) for epoch in self._epochs()]
        else:
            paths = [_result_path(run, suite) for suite in self.evaluation.results()]
        for path in paths:
            if path.exists():
                path.touch()

    def prepare(self) -> None:
        """Removes what an earlier WiSE-FT left, whose source has changed since."""
        if self.cell.kind == WISE_FT:
            (self.cell.folder / run_files.BEST).unlink(missing_ok=True)
            shutil.rmtree(self.cell.folder / f"alpha_{self.alpha:g}", ignore_errors=True)

    def finish(self) -> None:
        """Links ``best`` to WiSE-FT's model."""
        if self.cell.kind == WISE_FT:
            _link(self.cell.folder / run_files.BEST, Path(f"alpha_{self.alpha:g}"))

    def remove_surplus(self) -> None:
        """With ``keep`` best or last, a trained run's other models and the state to resume from, once its model is chosen."""
        run, keep = self.cell.folder, self.grid.keep
        if keep == "all" or self.cell.kind in (WISE_FT, SMALL_LR) or not self.is_selected():
            return
        epochs = run_files.epoch_folders(run)
        kept = run_files.chosen_model(run) if keep == "best" else epochs[max(epochs)]
        for folder in epochs.values():
            if kept is not None and folder.resolve() != kept.resolve():
                shutil.rmtree(folder)
        if not (run / run_files.BEST).exists():
            (run / run_files.BEST).unlink(missing_ok=True)
        shutil.rmtree(run / run_files.CHECKPOINTS, ignore_errors=True)

    def link_to(self, source: Path) -> None:
        """Makes small_lr's folder the run that was chosen: its files are links to that run's."""
        for name in _LINKED:
            target = run_files.chosen_model(source) if name == run_files.BEST else source / name
            assert target is not None
            _link(self.cell.folder / name, Path("..") / source.name / target.name)


def run_words(grid: Grid, cell: Cell) -> list[str]:
    """CONFIG and the overrides of a cell's run."""
    resume = [] if grid.overwrites else ["resume_from_checkpoint=auto"]
    return [grid.config, *grid.overrides, *cell.overrides(), *resume]


def is_trained(run: Path, cfg: DictConfig) -> bool:
    """Whether the run has taken all of its steps, and the model of its last epoch is written.

    The recipe writes the last epoch's folder, which appears complete or not at all, then the state after it. Both must be there.
    Where there is no state, as checkpoints have been removed to save room, the folder is enough. Where of the epochs only ``best`` is left,
    state or cell.json is enough. A run that ``early_stopping`` or ``forgetting_budget`` has stopped is finished too. A run that should be started again
    (RUN/REQUEUE) is not.
    """
    if (run / run_files.REQUEUE).exists():
        return False
    last = run / f"epoch_{cfg.epochs - 1}"
    is_exported = last.is_dir() or last.with_name(f"{last.name}_adapter").is_dir()
    has_best = (run / run_files.BEST).exists()
    state = _newest_state(run)
    if state is None:
        return is_exported or (has_best and _was_finished(run, cfg))
    return (state["epoch"] >= cfg.epochs and (is_exported or has_best)) or _is_stopped(state, cfg)


def missing_results(run: Path, evaluation: Evaluation, base: str | None = None) -> list[str]:
    """The suites whose results are absent, lack a task, are older than the run's model, or are of other data, another limit or another ``base``."""
    written, results = _chosen_at(run), evaluation.results()
    return [one for one in results if not _is_result(_result_path(run, one), results[one], evaluation, written, base)]


def slurm_error(run: Path) -> str:
    """The user's mistake that ended the last start of the run's Slurm jobs; empty if it ended otherwise."""
    starts = sorted((run / "slurm").glob("*/start_*"), key=lambda path: path.stat().st_mtime)
    error = starts[-1] / "error" if starts else run / "absent"
    return error.read_text(encoding="utf-8", errors="replace").strip() if error.is_file() else ""


def different_key(run: Path, cfg: DictConfig) -> tuple[str, Any, Any] | None:
    """A key in which the folder's run differs from a config, the run's value and the config's. None: there is no run, or no such key."""
    from omegaconf import OmegaConf

    from finch.config.resolved import redacted
    from finch.config.schema import affecting

    path = run / run_files.CONFIG
    if not path.is_file():
        return None
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); remove {run}") from error
    config = redacted(cfg)
    assert isinstance(saved, dict)
    # Of a checkpointer the folder is compared below. Cells of earlier versions were averaged, after all that counts here.
    left_out = affecting("place") | {"checkpointer", "average"}
    for key in sorted(saved.keys() & config.keys() - left_out, key=str):
        if saved[key] != config[key]:
            return str(key), saved[key], config[key]
    old, new = (str(each["checkpointer"]["checkpoint_dir"]) for each in (saved, config))
    if Path(old).resolve() != Path(new).resolve():
        return "checkpointer.checkpoint_dir", old, new
    with contextlib.suppress(UserError):  # cell.json is written again
        earlier, now = read_cell(run)["rows"] or {}, row_hashes(cfg)
        for key in earlier:
            if key in now and earlier[key] != now[key]:
                return f"hashes of {key}.data_files", earlier[key], now[key]
    return None


def check_method(grid: Grid, cell: Cell, cfg: DictConfig) -> None:
    """Raises UserError where other keys of the grid have made the cell one of another method than it says."""
    from omegaconf import OmegaConf

    if (name := cell.values.get(METHOD)) is None:
        return
    blocks, _, names = apply_method({}, [f"{METHOD}={name}"])
    rate = next((word for word in grid.overrides if word.startswith(f"{LR}=")), None)
    if SMALL_LR in names and LR not in cell.values and rate is not None:
        raise UserError(f"{rate} would be method={name}'s too; give {LR} in the config, or in the grid")
    is_measured = any(key.endswith(".strength") and value == 0 for key, value in cell.values.items())
    if LABEL in cell.values or is_measured:
        return
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    trained = method_of_config({key: config.get(key) for key in blocks})
    if trained != method_of_config(blocks):
        raise UserError(
            f"method={name}, but other keys of the grid make it {trained}; leave them out, or give the mapping a label"
        )


def row_hashes(cfg: DictConfig) -> dict[str, list[str]]:
    """Of the local files of rows, by the config's key; rows of the hub and files that are not here have none. Not their times: a copy is the same."""
    from finch.data.cache import content_hash
    from finch.data.row_files import local_files, nodes_of, validation_sets

    found = {}
    for key, node in {"dataset": cfg.dataset, **dict(validation_sets(cfg.dataset_validation).values())}.items():
        with contextlib.suppress(UserError, OSError):
            names = [each.data_files for each in nodes_of(node) if each.get("data_files") is not None]
            found[key] = [content_hash(file)[1] for name in names for file in local_files(name)]
    return {key: hashes for key, hashes in found.items() if hashes}


def _newest_state(run: Path) -> dict[str, Any] | None:
    from finch.checkpoint.reader import list_checkpoints, read_state

    for folder in list_checkpoints(run):
        try:
            return read_state(folder)
        except (OSError, ValueError):  # the recipe reports a damaged one
            continue
    return None


def _was_finished(run: Path, cfg: DictConfig) -> bool:
    """Whether an earlier call has seen the end of a run of as many epochs."""
    from omegaconf import OmegaConf

    try:
        epochs = OmegaConf.select(OmegaConf.load(run / run_files.CONFIG), "epochs")
        return epochs == cfg.epochs and read_cell(run)["status"] in (FINISHED, EVALUATED)
    except (OSError, UserError):
        return False


def _is_stopped(state: dict[str, Any], cfg: DictConfig) -> bool:
    from finch.config.schema import Budget

    readings = state.get("early_stopping", {"num_worse": 0})["num_worse"]
    if cfg.early_stopping is not None and readings >= cfg.early_stopping.patience:
        return True
    budget, last = Budget.of(cfg.forgetting_budget), state.get("forgetting_budget")
    if budget is None or budget.action != "stop" or last is None:
        return False
    return not last["value"] <= budget.max_increase  # a NaN is outside


def _result_path(run: Path, suite: str, epoch: str = "") -> Path:
    return run / run_files.EVALUATION / epoch / f"{suite}.json"


def _written(model: Path) -> float:
    return max((path.stat().st_mtime for path in model.iterdir()), default=0.0)


def _chosen_at(run: Path) -> float:
    """When the run's model was written or, if that was later, linked as its best one. A link to another run, as small_lr's, says nothing."""
    model = run_files.chosen_model(run)
    if model is None:
        return 0.0
    is_own_link = model.is_symlink() and len(model.readlink().parts) == 1
    return max(_written(model), model.lstat().st_mtime if is_own_link else 0.0)


def _is_result(path: Path, tasks: set[str], evaluation: Evaluation, written: float, base: str | None = None) -> bool:
    root, limit = evaluation.data_root, evaluation.limit
    asked = {"limit": limit, "data": "hub" if root is None else str(Path(root).resolve())}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_complete = tasks <= content["tasks"].keys() and content["settings"].items() >= asked.items()
        is_complete = is_complete and path.stat().st_mtime >= written
        is_complete = is_complete and all(_is_current(name, content, root) for name in tasks)
        return is_complete and (base is None or _is_compared_with(base, path, content))
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _is_current(name: str, content: Mapping[str, Any], root: str | None) -> bool:
    """Whether a result is of the task as it is now, and of its local rows as they are now; of lm-eval's other tasks only the evaluation knows."""
    from finch.evaluation.judge import answers_definition

    if (task := TASKS.get(name)) is None:
        return True
    result, is_chat = content["tasks"][name], content["settings"].get("prompt") == "chat template"
    rows = result.get("rows")
    with contextlib.suppress(UserError):  # rows that are gone cannot be evaluated again
        rows = None if root is None else task.hash_rows(Path(root))
    return bool(answers_definition(result["definition"]) == task.definition(is_chat) and result.get("rows") == rows)


def _is_compared_with(base: str, path: Path, content: Mapping[str, Any]) -> bool:
    """Whether a result's pretrained model is ``base`` or a copy of it; True where that cannot be known."""
    own = path.parent / (content.get("base") or "absent")
    if not own.is_file() or not Path(base).is_dir():
        return True
    earlier = json.loads(own.read_text(encoding="utf-8"))
    is_same_folder = earlier["model"] == str(Path(base).resolve()) and _written(Path(base)) <= own.stat().st_mtime
    return is_same_folder or earlier["weights"] == _hash_of(base)


@functools.cache
def _hash_of(base: str) -> str:
    from finch.evaluation.loading import hash_weights
    from finch.evaluation.model_folders import ModelFolder

    return hash_weights(ModelFolder("--base", Path(base)))


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and link.readlink() == target:
        return
    if link.is_dir() and not link.is_symlink():
        os.rmdir(link)  # empty: an evaluation that wrote nothing
    with atomic_file(link) as partial:
        partial.symlink_to(target)
