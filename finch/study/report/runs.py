"""The runs of a report: their folders' configs, metrics and results of evaluations."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from finch.base import run_files, status
from finch.base.errors import UserError
from finch.base.files import read_bytes
from finch.config.instantiate import component_of
from finch.config.methods import METHODS
from finch.evaluation.foreign import read_data
from finch.evaluation.results import MEASURED, SuiteResult, read_as, read_results
from finch.study.sweep.grid import LABEL, LOG, LR, METHOD, SEED

BATCH_SIZE = "batch_size"
_MODEL = re.compile(r"(?P<kind>epoch|\w+_step)_(?P<number>\d+)(_adapter)?")
_TRAINED_BY = (
    *("model", "tokenizer", "epochs", "max_steps_per_epoch", "optimizer", "lr_scheduler", "clip_grad_norm", "dtype"),
    *("loss", "regularizer", "kl_penalty", "self_replay"),
)
"""Keys of a config by which runs of other seeds are other settings. Not the rows: those of a seed may be its own."""
_OWN = {LR, LOG, "self_replay.cache", "model.path", "tokenizer.path", "tokenizer.merges_file", "tokenizer.date"}


@dataclass(frozen=True)
class _Config:
    """The types of what a report takes of a config."""

    epochs: int | None = None
    save_last_epoch_only: bool | None = None
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    seed: int | None = None
    dtype: str | None = None
    probes: dict[str, dict[str, Any] | None] | None = None
    model: dict[str, Any] | None = None
    checkpointer: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Cell:
    """Of a sweep's cell.json."""

    values: dict[str, Any] | None = None
    task: str | None = None
    status: str | None = None


@dataclass(frozen=True)
class _Values:
    """Of a run's values."""

    optimizer_lr: Annotated[float | None, Field(alias=LR, gt=0)] = None
    seed: int | None = None
    batch_size: int | None = None
    label: Annotated[str | None, Field(alias=LABEL)] = None


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Attributes:
        folder: the run's.
        values: what distinguishes the run: a sweep's cell, else method, optimizer.lr, batch_size and seed of its config.
        config: the resolved config.yaml; empty without one, as for WiSE-FT's average of weights.
        metrics: lines of metrics.jsonl; empty before the first step.
        results: of evaluations, by suite.
        task: a sweep's name of what is learned, such as ``knowledge``.
        status: a sweep's; None for a single run.
        best_epoch: from 0, the epoch that RUN/best links; None without validation, or before the first epoch has ended.
        best_step: of a model within an epoch, as early stopping and a forgetting budget keep it.
        average_of: the run whose model is averaged with its pretrained one; None for a run itself.
    """

    folder: Path
    values: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    results: Mapping[str, SuiteResult] = field(default_factory=dict)
    task: str | None = None
    status: str | None = None
    best_epoch: int | None = None
    best_step: int | None = None
    average_of: Run | None = None

    @property
    def trained_by(self) -> dict[str, Any]:
        """What else its config trains by than ``values`` say, by dotted keys: runs that are averaged have it in common."""
        found: dict[str, Any] = {}
        for key in _TRAINED_BY:
            block = self.config.get(key)
            for name, value in block.items() if isinstance(block, dict) else [("_component_", block)]:
                found[f"{key}.{name}".removesuffix("._component_")] = value
        return {key: value for key, value in found.items() if value is not None and key not in _OWN}

    @property
    def num_rows(self) -> int | None:
        """Training rows, without those that are held out; None without a checkpoint, which has their number."""
        from finch.checkpoint.reader import list_checkpoints, read_state

        for folder in list_checkpoints((self.average_of or self).folder):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
                return int(read_state(folder)["identity"]["number of samples"])
        return None

    @property
    def label(self) -> str | None:
        """A sweep's name for the run's method."""
        return self.values.get(LABEL)

    @property
    def method(self) -> str:
        """Whose front the run belongs to: its label, else its method."""
        return self.label or str(self.values[METHOD])

    @property
    def learning_rate(self) -> float | None:
        return self.values.get(LR)

    @property
    def seed(self) -> int | None:
        return self.values.get(SEED)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of metrics.jsonl that are steps."""
        return [line for line in self.metrics if not run_files.is_event(line)]

    @property
    def finished_epochs(self) -> int:
        """Epochs whose model is there; with ``save_last_epoch_only``, which leaves only the last one's, all up to it."""
        if self.average_of is not None:
            return self.average_of.finished_epochs
        if self.config.get("save_best_only"):
            is_finished = status.read(self.folder / run_files.STATUS)["is_finished"]
            return max((int(step.get("epoch") or 0) for step in self.steps), default=0) + bool(is_finished)
        written = {number for number, _ in run_files.epoch_folders(self.folder)}
        return max(written) + 1 if written and self.config.get("save_last_epoch_only") else len(written)

    def result_path(self, suite: str) -> Path:
        return self.folder / run_files.EVALUATION / f"{suite}.json"


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs among ``folders``, of runs or of sweeps, each once. Raises UserError for one that is neither."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the folders of runs, or of a sweep")
        cells = [folder] if _is_run(folder) else sorted(path.parent for path in folder.glob(f"*/{run_files.CELL}"))
        if not cells:
            raise UserError(
                f"{folder} is no run (it has no {run_files.CONFIG}, {run_files.METRICS} or {run_files.CELL}) and no sweep's folder; "
                "give the folders of runs, or of a sweep"
            )
        found.update({cell.resolve(): cell for cell in cells})
    return list(found.values())


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """
    Args:
        folders: of runs, or of sweeps, whose cells are all read; a run that is named twice is read once. Their averages follow.

    Raises:
        UserError: a folder is neither, has no readable files, or there is nothing in any of them yet.
    """
    trained = [read_run(folder) for folder in find_runs(folders)]
    runs = [*trained, *filter(None, map(_average_of, trained))]
    if not any(run.metrics or run.results for run in runs):
        raise UserError(f"{runs[0].folder} has no steps and no evaluations yet; wait for the first step of a run")
    return runs


def sort_runs(runs: Iterable[Run]) -> list[Run]:
    """By method, as `finch list methods` lists them, after these by label; then by learning rate, the other values and seed."""
    order = list(METHODS)

    def key(run: Run) -> tuple[object, ...]:
        names = run.method.split("+")
        known = [order.index(name) if name in order else len(order) for name in names]
        others = sorted((key, str(value)) for key, value in run.values.items() if key not in (LR, SEED))
        method = run.label is not None, len(names), known, run.method
        return *method, run.learning_rate or math.inf, others, -1 if run.seed is None else run.seed, str(run.folder)

    return sorted(runs, key=key)


def check_equal(values: Mapping[str, Run], message: str) -> None:
    """Raises UserError where ``values``, each with a run that has it, are several; the message names two as ``{one}`` and ``{other}``."""
    if len(values) > 1:
        (one, run), (other, other_run) = list(values.items())[:2]
        raise UserError(message.format(one=one, run=run.folder, other=other, other_run=other_run.folder))


def read_run(folder: Path) -> Run:
    """
    Raises:
        UserError: one of its files is broken.
    """
    config = _read(folder / run_files.CONFIG, _Config)
    cell = _read(folder / run_files.CELL, _Cell)
    values = {**_values_of_config(config), **(cell.get("values") or {})}
    values[METHOD] = str(values.get(METHOD, folder.name))
    try:
        read_as(_Values, json.dumps(values))
    except ValueError as error:
        raise UserError(
            f"{folder} has a value that is none ({error}); restore its config.yaml and cell.json, or leave the run out"
        ) from error
    metrics = folder / run_files.METRICS
    best = _chosen(folder)
    return Run(
        folder=folder,
        values=values,
        config=config,
        metrics=run_files.read_metrics(metrics) if metrics.exists() else [],
        results=read_results(folder / run_files.EVALUATION),
        task=cell.get("task"),
        status=cell.get("status"),
        best_epoch=int(best["number"]) if best and best["kind"] == "epoch" else None,
        best_step=int(best["number"]) if best and best["kind"] != "epoch" else None,
    )


def _average_of(run: Run) -> Run | None:
    """RUN/average with what `finch average` has measured of it, if it is of the run's last model."""
    folder = run.folder / run_files.AVERAGE
    measured = _read(folder / MEASURED, dict[str, float])
    if not measured:
        return None
    from finch.evaluation.model_folders import has_average  # which imports torch

    if not has_average(run.folder):
        return None
    names = {key: f"wise_ft+{run.values[key]}" for key in (METHOD, LABEL) if key in run.values}
    end = {"step": max((line["step"] for line in run.metrics), default=1), **measured}
    return replace(
        run,
        folder=folder,
        values={**run.values, **names},
        metrics=[*(line for line in run.metrics if line["step"] == 0), end],
        results=read_results(folder / run_files.EVALUATION),
        best_epoch=None,
        best_step=None,
        average_of=run,
    )


def method_of_config(config: Mapping[str, Any]) -> str:
    """The name of the method whose blocks a config has, such as ``finch+talr``; ``sft`` without any of another method. A block of strength 0 only
    measures."""
    config = {key: one for key, one in config.items() if not (isinstance(one, Mapping) and one.get("strength") == 0)}

    def has(key: str, block: Any) -> bool:
        value = config.get(key)  # of a constant rate none, or its decay
        return (block is None or value is not None) and component_of(value) == component_of(block)

    names = []
    for name, method in METHODS.items():
        blocks = [item for item in method.blocks.items() if item[0] != "model"]
        if name != "sft" and blocks and all(has(*item) for item in blocks):
            names.append(name)
    # asft and preserve have the blocks of others, which are not named with them.
    found = {name: {(key, component_of(one)) for key, one in METHODS[name].blocks.items()} for name in names}
    names = [name for name, blocks in found.items() if not any(blocks < others for others in found.values())]
    if _builder(config).startswith(("lora_", "qlora_")):
        names.append("lora")
    return "+".join(names) or "sft"


def base_builder(config: Mapping[str, Any]) -> str:
    """The model's builder without LoRA's prefix, such as ``qwen3_4b``; empty without a config."""
    return _builder(config).removeprefix("qlora_").removeprefix("lora_")


def _builder(config: Mapping[str, Any]) -> str:
    return str(component_of(config.get("model")) or "").rpartition(".")[2]


def _values_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config:
        return {}
    lr, batch_size = (config.get("optimizer") or {}).get("lr"), config.get("batch_size")
    num_batches = config.get("gradient_accumulation_steps") or 1
    rows = None if batch_size is None else batch_size * num_batches
    method = method_of_config(config)
    values = {METHOD: method, LR: lr, BATCH_SIZE: rows, SEED: config.get("seed")}
    if "lr_replay" in method.split("+"):  # its rates are the log's
        del values[LR]
    return {key: value for key, value in values.items() if value is not None}


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (run_files.CONFIG, run_files.METRICS, run_files.CELL))


def _read(path: Path, kind: type) -> dict[str, Any]:
    """A mapping whose values are of the types that ``kind`` has; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = read_data(path) if path.name == run_files.CONFIG else json.loads(read_bytes(path))
        read_as(kind, json.dumps(content))
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or leave the run out") from error
    return content


def _chosen(folder: Path) -> re.Match[str] | None:
    """What the link to the run's model says of it: an epoch's, or a step's."""
    model = run_files.chosen_model(folder)
    return re.fullmatch(_MODEL, model.readlink().name) if model is not None and model.is_symlink() else None
