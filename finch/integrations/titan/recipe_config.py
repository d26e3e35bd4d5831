"""A TorchTitan run's folder as finch's commands know a run: RUN/config.yaml, a config of finch's recipe that trains the same, and the last model's
link ``epoch_N``."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import TrainingConfig

from finch.base import files
from finch.base.errors import UserError
from finch.base.log import logger
from finch.base.run_files import CONFIG, is_epoch
from finch.integrations.titan.dataloader import ROWS_KEYS, TOKENIZER_KEYS, RowsDataLoader
from finch.integrations.titan.losses import ObjectiveLoss, inner_loss
from finch.integrations.titan.lr_scheduler import SCHEDULE_KEYS, FinchLRSchedulersContainer

RECIPE_KEYS = ("self_replay", "probes", "probes_every_n_steps", "forgetting_budget")
"""Of a ``FinchTrainer.Config``, with the recipe's names and values."""


def pretrained_folder(config: Any) -> Path | None:
    """The Hugging Face folder whose weights a run takes; None: it takes no such weights."""
    checkpoint = config.checkpoint
    if not (checkpoint.enable and checkpoint.initial_load_in_hf):
        return None
    return Path(checkpoint.initial_load_path or config.hf_assets_path)


def write_config(trainer: Any, folder: Path) -> None:
    """Writes RUN/config.yaml; by one rank. Not for weights that are no Hugging Face folder's, and not without the extra ``torchtune``, which the
    commands that read it need as well."""
    config = trainer.config
    if pretrained_folder(config) is None or not find_spec("omegaconf"):
        return
    from omegaconf import OmegaConf

    ranks = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard
    command = f"finch run{f' --nproc_per_node {ranks}' if ranks > 1 else ''} {folder}/{CONFIG} output_dir=NEW"
    blocks = recipe_blocks(trainer)
    differences = _differences(trainer, blocks["epochs"])
    lines = [f"The run that TorchTitan has trained here, for finch's recipe: {command}", *differences]
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_text(
        folder / CONFIG, "".join(f"# {line}\n" for line in lines) + OmegaConf.to_yaml(OmegaConf.create(blocks))
    )


def recipe_blocks(trainer: Any) -> dict[str, Any]:
    """The recipe's config of a run that takes the weights of a Hugging Face folder."""
    config, weights = trainer.config, str((pretrained_folder(trainer.config) or Path()).resolve())
    rounds, number = getattr(trainer.dataloader, "rounds_per_epoch", None), trainer.gradient_accumulation_steps
    steps = config.training.steps
    epochs = 1 if rounds is None else -(-steps * number // rounds)
    blocks: dict[str, Any] = {
        "output_dir": str(Path(config.dump_folder).resolve()),
        "model": {"_component_": "finch.models.auto", "path": weights},
        "tokenizer": _tokenizer(config),
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": weights,
            "checkpoint_files": None,
            "output_dir": "${output_dir}",
            "model_type": None,
        },
        "dataset": _rows(config.dataloader),
        "dataset_validation": _rows(config.validator.dataloader) if config.validator.enable else None,
        "seed": getattr(config.dataloader, "seed", 0),
        "shuffle": getattr(config.dataloader, "is_shuffled", True),
        "batch_size": config.training.local_batch_size,
        "gradient_accumulation_steps": number,
        "epochs": epochs,
        "max_steps_per_epoch": steps if epochs == 1 else None,
        "optimizer": _optimizer(config.optimizer),
        "lr_scheduler": _schedule(config.lr_scheduler),
        "loss": _loss(config.loss),
        "clip_grad_norm": config.training.max_norm if math.isfinite(config.training.max_norm) else None,
        "dtype": _dtype(config.training),
        "device": "auto",
        **{key: getattr(config, key) or None for key in RECIPE_KEYS},
    }
    return {key: value for key, value in blocks.items() if value is not None}


def link_model(folder: Path, model: Path, epoch: int) -> None:
    """``epoch_N``, by which chat, average, evaluate and report find the run's model; that of an earlier end of the run goes."""
    if not any(model.glob("*.safetensors")):
        return
    link = folder / f"epoch_{epoch}"
    try:
        for old in folder.glob("epoch_*"):
            if is_epoch(old.name) and old.is_symlink():
                old.unlink()
        link.symlink_to(os.path.relpath(model.resolve(), folder.resolve()))
    except OSError as error:
        logger.warning(f"{link} is no link to {model} ({error}): give finch's commands that folder")


def complete_folder(folder: Path, assets: Path, tokenizer: Any = None) -> None:
    """Adds config and tokenizer of the pretrained folder to exported weights, so that transformers loads the folder, and it answers as it was
    trained by rows of finch's ``tokenizer``."""
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return
    for file in assets.glob("*"):
        is_text = file.suffix in (".json", ".model", ".txt", ".jinja") and not file.name.endswith(".index.json")
        if is_text and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    if tokenizer is None:
        return
    from finch.weights.huggingface import HuggingFaceFolder

    try:
        base = HuggingFaceFolder(str(assets), [])
    except UserError as error:  # TorchTitan has models that finch's recipe has not
        logger.warning(f"{folder} has the chat template and stop tokens of the pretrained model ({error})")
        return
    base.chat_template, base.stop_tokens = tokenizer.chat_template, tokenizer.stop_tokens
    base.write_chat_settings(folder)


def _differences(trainer: Any, epochs: int) -> Iterator[str]:
    """What the recipe does otherwise."""
    config, rounds = trainer.config, getattr(trainer.dataloader, "rounds_per_epoch", None)
    if epochs > 1:
        yield "It takes whole epochs."
        if rounds % trainer.gradient_accumulation_steps:
            yield "Its steps end with the epoch; here an epoch's last one takes the first rows of the next epoch too."
    if not all(weight.requires_grad for model in trainer.model_parts for weight in model.parameters()):
        yield "It trains all weights, of which some are frozen here."
    if not isinstance(config.dataloader, RowsDataLoader.Config):
        yield "Its rows are another dataloader's: add a dataset to train, or to average; chat, evaluate and report need none."
    if config.self_replay and getattr(config.dataloader, "is_packed", False):
        yield "It refuses self_replay with packs: add dataset.packed=False, and its steps are of rows."
    if len(config.optimizer.param_groups) > 1:
        yield f"Its optimizer has {len(config.optimizer.param_groups)} groups, of which the last one is here."
    if config.lr_scheduler.total_steps:
        yield "Its lr_scheduler.total_steps is left out: the recipe counts the run's own."


def _tokenizer(config: Any) -> dict[str, Any]:
    folder, loader = str(Path(config.hf_assets_path).resolve()), config.dataloader
    changed = _changed(loader, TOKENIZER_KEYS) if isinstance(loader, RowsDataLoader.Config) else {}
    length = {"max_seq_len": config.training.seq_len}
    return {"_component_": "finch.models.auto_tokenizer", "path": folder, **changed, **length}


def _rows(loader: BaseDataLoader.Config) -> dict[str, Any] | None:
    if not isinstance(loader, RowsDataLoader.Config):
        return None
    from finch.config.schema import ROWS
    from finch.data.rows import files_and_source

    given = _changed(loader, ROWS_KEYS)
    if loader.data_files and files_and_source(loader.source, loader.data_files)[0]:  # neither URLs nor the hub's
        given["data_files"] = str(Path(loader.data_files).absolute())
    return {"_component_": ROWS, **given, "packed": loader.is_packed}


def _optimizer(config: Any) -> dict[str, Any] | None:
    """Of the group for all that no other one takes, if torch has it."""
    group = config.param_groups[-1]
    if not hasattr(torch.optim, group.optimizer_name):
        return None
    fused = {"fused": config.implementation == "fused"}
    return {"_component_": f"torch.optim.{group.optimizer_name}", **fused, **group.optimizer_kwargs}


def _schedule(config: FinchLRSchedulersContainer.FINCHConfig) -> dict[str, Any]:
    decay = {"decay": config.decay_ratio} if config.decay_ratio else {}
    return {"_component_": "finch.FinchLR", "init": config.init, **_changed(config, SCHEDULE_KEYS), **decay}


def _changed(config: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the fields that have another value than their default."""
    usual = type(config)()
    return {key: getattr(config, key) for key in keys if getattr(config, key) != getattr(usual, key)}


def _loss(config: Any) -> dict[str, Any]:
    inner = inner_loss(config)
    if not isinstance(inner, ObjectiveLoss.Config):
        return {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    options = {"tau": inner.tau, "w_min": inner.w_min} if inner.objective == "TALR" else {}
    return {"_component_": f"finch.objectives.{inner.objective}", **options}


def _dtype(training: TrainingConfig) -> str:
    if training.dtype != "float32":
        return {"bfloat16": "bf16", "float16": "fp16"}.get(training.dtype, training.dtype)
    return "fp32" if training.mixed_precision_param == "float32" else "bf16_mixed"
