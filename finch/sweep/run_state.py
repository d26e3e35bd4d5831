"""What a run's folder says: whether the run is finished and evaluated, and whether it is another config's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch import run_files
from finch.errors import UserError
from finch.sweep.cells import EVALUATED, FINISHED, read_cell
from finch.sweep.grid import Evaluation

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Keys that do not change what a run computes, or that a finished run may have had otherwise.
_IGNORED = frozenset(
    [
        "output_dir",
        "resume_from_checkpoint",
        "overwrite",
        "epochs",
        "checkpoint",
        "checkpointer",
        "save_last_epoch_only",
        "metric_logger",
        "log_every_n_steps",
        "log_level",
        "log_peak_memory_stats",
        "profiler",
        "num_workers",
        "distributed_timeout",
        "device",
    ]
)


def is_trained(run: Path, cfg: DictConfig) -> bool:
    """Whether the run has taken all of its steps, and the model of its last epoch is written.

    The recipe writes the last epoch's folder, which appears complete or not at all, then the state after it. Both are looked at;
    where there is no state, as checkpoints have been removed to save room, the folder counts. Where only ``best`` is left of the epochs,
    state or cell.json count. A run that ``forgetting_budget`` has stopped is finished too. One that should be started again (RUN/REQUEUE)
    is not.
    """
    if (run / run_files.REQUEUE).exists():
        return False
    last = run / f"epoch_{cfg.epochs - 1}"
    is_exported = last.is_dir() or last.with_name(f"{last.name}_adapter").is_dir()
    has_best = (run / run_files.BEST).exists()
    state = _newest_state(run)
    if state is None:
        return is_exported or (has_best and _was_finished(run, cfg))
    return (state["epoch"] >= cfg.epochs and (is_exported or has_best)) or _is_stopped_by_budget(state, cfg)


def missing_results(run: Path, evaluation: Evaluation) -> list[str]:
    """The suites whose results are not there, lack a task, are older than the run's model, or are of another limit."""
    model = run_files.chosen_model(run)
    written = 0.0 if model is None else max((path.stat().st_mtime for path in model.iterdir()), default=0.0)
    return [
        suite
        for suite, tasks in evaluation.results().items()
        if not _is_result(_result_path(run, suite), tasks, evaluation.limit, written)
    ]


def mark_results_new(run: Path, evaluation: Evaluation) -> None:
    """After `finch evaluate`, which leaves a result as it is where the model's weights are those that it was made with."""
    for suite in evaluation.results():
        if (path := _result_path(run, suite)).exists():
            path.touch()


def slurm_error(run: Path) -> str:
    """The user's mistake that the last start of the run's Slurm jobs has ended with; empty where it has ended otherwise."""
    starts = sorted((run / "slurm").glob("*/start_*"), key=lambda path: path.stat().st_mtime)
    error = starts[-1] / "error" if starts else run / "absent"
    return error.read_text(encoding="utf-8", errors="replace").strip() if error.is_file() else ""


def different_key(run: Path, cfg: DictConfig) -> tuple[str, Any, Any] | None:
    """A key in which the folder's run differs from a config, the run's value and the config's; None where there is no run, or none."""
    from omegaconf import OmegaConf

    from finch.config.resolved import redacted

    path = run / run_files.CONFIG
    if not path.is_file():
        return None
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); remove {run}") from error
    config = OmegaConf.to_container(redacted(cfg), resolve=True)
    assert isinstance(saved, dict)
    assert isinstance(config, dict)
    for key in sorted(saved.keys() & config.keys() - _IGNORED, key=str):
        if saved[key] != config[key]:
            return str(key), saved[key], config[key]
    old, new = (str(each["checkpointer"]["checkpoint_dir"]) for each in (saved, config))
    if Path(old).resolve() != Path(new).resolve():
        return "checkpointer.checkpoint_dir", old, new
    return None


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


def _is_stopped_by_budget(state: dict[str, Any], cfg: DictConfig) -> bool:
    from finch.probes.settings import read_budget

    budget, last = read_budget(cfg), state.get("forgetting_budget")
    if budget is None or budget.action != "stop" or last is None:
        return False
    return not last["value"] <= budget.max_increase  # a NaN is outside


def _result_path(run: Path, suite: str) -> Path:
    return run / run_files.EVALUATION / f"{suite}.json"


def _is_result(path: Path, tasks: set[str], limit: int | None, written: float) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_complete = tasks <= content["tasks"].keys() and content["settings"].get("limit") == limit
        return is_complete and path.stat().st_mtime >= written
    except (OSError, ValueError, KeyError, AttributeError):
        return False
