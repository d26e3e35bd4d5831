"""A TorchTitan run's folder as finch's commands know a run: RUN/config.yaml, a config of finch's recipe that trains the same, and the last model's
link ``epoch_N``."""

from __future__ import annotations

import math
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TrainingConfig

from finch.base import files
from finch.base.run_files import CONFIG, epoch_folders
from finch.integrations.titan.dataloader import RowsDataLoader
from finch.integrations.titan.losses import ObjectiveLoss
from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer

_ROWS_KEYS = ("source", "data_files", "name", "split", "format", "part", "validation_fraction", "split_seed")
_SCHEDULE_KEYS = ("eta_max", "init", "ema", "eps", "on_nonfinite", "max_nonfinite", "warmup_steps")
_HEADER = "# The run that TorchTitan has trained here, for finch's recipe, which takes whole epochs: finch run {folder}/config.yaml output_dir=...\n"


def write_config(trainer: Any, folder: Path) -> None:
    """Writes RUN/config.yaml; by one rank. Rows of another dataloader than finch's are left out: chat, evaluate and report need none. Without the
    extra ``torchtune`` nothing is written: the commands that read it need that as well."""
    if not find_spec("omegaconf"):
        return
    from omegaconf import OmegaConf

    config, absolute = trainer.config, str(Path(trainer.config.hf_assets_path).resolve())
    validator, per_epoch = config.validator, _steps_per_epoch(trainer)
    group = config.optimizer.param_groups[0]
    blocks: dict[str, Any] = {
        "output_dir": str(folder.resolve()),
        "model": {"_component_": "finch.models.auto", "path": absolute},
        "tokenizer": _tokenizer(absolute, config),
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": absolute,
            "checkpoint_files": None,
            "output_dir": "${output_dir}",
            "model_type": None,
        },
        "dataset": _rows(config.dataloader),
        "dataset_validation": _rows(validator.dataloader) if validator.enable else None,
        "seed": getattr(config.dataloader, "seed", 0),
        "shuffle": getattr(config.dataloader, "is_shuffled", True),
        "batch_size": config.training.local_batch_size,
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        "epochs": 1 if per_epoch is None else math.ceil(config.training.steps / per_epoch),
        "optimizer": {
            "_component_": f"torch.optim.{group.optimizer_name}",
            **group.optimizer_kwargs,
            "fused": config.optimizer.implementation == "fused",
        },
        "lr_scheduler": _schedule(config.lr_scheduler),
        "loss": _loss(config.loss),
        "clip_grad_norm": config.training.max_norm or None,
        "dtype": _dtype(config.training),
        "device": "auto",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with files.atomic_file(folder / CONFIG) as partial:
        plain = OmegaConf.to_yaml(OmegaConf.create({key: value for key, value in blocks.items() if value is not None}))
        files.write_text(partial, _HEADER.format(folder=folder) + plain)


def link_model(folder: Path, model: Path, epoch: int) -> None:
    """``epoch_N``, by which chat, average, evaluate and report find the run's model; that of an earlier end of the run goes."""
    if not model.is_dir():
        return
    for old in epoch_folders(folder).values():
        if old.is_symlink():
            old.unlink()
    (folder / f"epoch_{epoch}").symlink_to(model.relative_to(folder), target_is_directory=True)


def _steps_per_epoch(trainer: Any) -> float | None:
    rounds = getattr(trainer.dataloader, "rounds_per_epoch", None)
    return None if rounds is None else rounds / trainer.gradient_accumulation_steps


def _tokenizer(folder: str, config: Any) -> dict[str, Any]:
    found = {"_component_": "finch.models.auto_tokenizer", "path": folder, "max_seq_len": config.training.seq_len}
    loader, usual = config.dataloader, RowsDataLoader.Config()
    if isinstance(loader, RowsDataLoader.Config):
        keys = ("prompt_style", "thinking")
        found |= {key: getattr(loader, key) for key in keys if getattr(loader, key) != getattr(usual, key)}
    return found


def _rows(loader: BaseDataLoader.Config) -> dict[str, Any] | None:
    if not isinstance(loader, RowsDataLoader.Config):
        return None
    usual = RowsDataLoader.Config()
    given = {key: getattr(loader, key) for key in _ROWS_KEYS if getattr(loader, key) != getattr(usual, key)}
    if loader.data_files is not None:
        given["data_files"] = str(Path(loader.data_files).absolute())
    columns = {"column_map": dict(loader.column_map)} if loader.column_map else {}
    return {"_component_": "finch.data.rows.rows_dataset", **given, **columns}


def _schedule(config: FinchLRSchedulersContainer.FINCHConfig) -> dict[str, Any]:
    usual = {field.name: field.default for field in fields(FinchLRSchedulersContainer.FINCHConfig)}
    given = {key: getattr(config, key) for key in _SCHEDULE_KEYS if getattr(config, key) != usual[key]}
    return {"_component_": "finch.FinchLR", "init": config.init, **given}


def _loss(config: Any) -> dict[str, Any]:
    inner = config.loss_fn if isinstance(config, ChunkedLossWrapper.Config) else config
    if not isinstance(inner, ObjectiveLoss.Config):
        return {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    options = {"tau": inner.tau, "w_min": inner.w_min} if inner.objective == "TALR" else {}
    return {"_component_": f"finch.objectives.{inner.objective}", **options}


def _dtype(training: TrainingConfig) -> str:
    if training.dtype != "float32":
        return {"bfloat16": "bf16", "float16": "fp16"}.get(training.dtype, training.dtype)
    return "fp32" if training.mixed_precision_param == "float32" else "bf16_mixed"
