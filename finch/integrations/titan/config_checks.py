"""What a FINCH run of TorchTitan refuses before anything is built."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.base.log import logger
from finch.integrations.titan.dataloader import TOFU
from finch.integrations.titan.losses import ObjectiveLoss, build_objective, inner_loss
from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer, build_schedule
from finch.integrations.titan.recipe_config import RECIPE_KEYS, pretrained_folder
from finch.models.hf_config import attention_window, is_tied, rope_settings

_STATE = "lr_scheduler."
_FINCH_STATE = f"{_STATE}ema_loss"
_METADATA, _HF_INDEX = ".metadata", "model.safetensors.index.json"
"""The files that a complete checkpoint of TorchTitan has one of."""
_ROPE_TYPES = {"default": "none", "llama3": "llama", "yarn": "yarn"}
_CONTEXT = "original_max_position_embeddings"
_SCALINGS = {
    "llama3": {"factor": "scaling_factor", **{key: key for key in ("low_freq_factor", "high_freq_factor", _CONTEXT)}},
    "yarn": {"factor": "rope_factor", _CONTEXT: "original_seq_len"},
}
"""From the names of Hugging Face's config.json to TorchTitan's."""


def check_config(config: Any) -> None:
    """Raises UserError for a setting of a ``FinchTrainer.Config`` that FINCH cannot work with."""
    spec = config.model_spec
    if not isinstance(spec.model, Decoder.Config):
        raise UserError(
            f"model_spec={spec.name} {spec.flavor} is no text decoder, of whose tokens FINCH follows the loss"
        )
    _check_parallelism(config.parallelism)
    _check_schedule(config)
    _check_loss(config.loss, config.parallelism)
    _check_checkpoint(config)
    _check_pretrained(config)
    _check_packing(config)
    _check_validation(config)
    if any(getattr(config, key) for key in RECIPE_KEYS):
        require_extras(f"{', '.join(RECIPE_KEYS[:2])} in TorchTitan", "torchtune")
        from finch.integrations.titan.recipe_hooks import check_keys

        check_keys(config)


def _check_packing(config: Any) -> None:
    attention = getattr(config.model_spec.model.first_attention, "inner_attention", None)
    loaders = {"dataloader": config.dataloader, "validator.dataloader": getattr(config.validator, "dataloader", None)}
    for key, loader in loaders.items():
        if getattr(loader, "is_packed", False) and isinstance(attention, ScaledDotProductAttention.Config):
            raise UserError(
                f"{key}.is_packed=True: the model's attention, ScaledDotProductAttention, does not keep the rows of a sequence apart; set it to "
                "False, or take FlexAttention"
            )


def _check_validation(config: Any) -> None:
    files, loader = getattr(config.dataloader, "data_files", None), getattr(config.validator, "dataloader", None)
    is_own = getattr(loader, "data_files", files) is not None or getattr(loader, "source", None) != TOFU
    if config.validator.enable and files and not is_own:
        raise UserError(
            f"validator.dataloader.data_files=None: dataloader.data_files={files} changes only the rows to train on; add "
            f"--validator.dataloader.source None --validator.dataloader.data_files {files}, or --validator.no-enable"
        )


def check_steps(config: Any, rounds: int | None, micro_batches: int) -> None:
    """Raises UserError if the rows end before the last step, after which alone TorchTitan saves. ``rounds``: micro-batches of an epoch, of which a
    step takes ``micro_batches``; None: not known."""
    if (
        rounds is not None
        and not getattr(config.dataloader, "infinite", True)
        and config.training.steps > rounds // micro_batches
    ):
        raise UserError(
            f"training.steps={config.training.steps}: with dataloader.infinite=False there are {rounds // micro_batches}; set that, or leave "
            "--dataloader.no-infinite out"
        )


def _check_parallelism(parallelism: Any) -> None:
    if parallelism.spmd_backend == "full_dtensor":
        raise UserError(
            "parallelism.spmd_backend=full_dtensor is not supported: its loss is summed twice over the ranks; set partial_dtensor"
        )
    if parallelism.pipeline_parallel_degree > 1:
        raise UserError(
            f"parallelism.pipeline_parallel_degree={parallelism.pipeline_parallel_degree} is not supported: the loss of a step, which its "
            "learning rate comes from, exists on the last stage only; set 1"
        )


def _check_schedule(config: Any) -> None:
    settings = config.lr_scheduler
    if not isinstance(settings, FinchLRSchedulersContainer.FINCHConfig):
        raise UserError(
            f"lr_scheduler={type(settings).__qualname__} is not FINCH's; make the config with finch.titan.to_finch_config"
        )
    defaults = FinchLRSchedulersContainer.FINCHConfig()
    for field in fields(LRSchedulersContainer.Config):
        value, default = getattr(settings, field.name), getattr(defaults, field.name)
        if value != default and field.name not in ("warmup_steps", "decay_ratio", "total_steps"):
            raise UserError(
                f"lr_scheduler.{field.name}={value} is not supported: FINCH's decay is linear, to 0; leave it at {default}"
            )
    groups = config.optimizer.param_groups
    lr = groups[0].optimizer_kwargs.get("lr") if groups else None
    if lr is None:
        raise UserError("optimizer.param_groups: the first group has no lr, which is FINCH's eta_base; set it")
    build_schedule(settings, [torch.optim.SGD([torch.zeros(())], lr=lr)], config.training.steps)


def _check_loss(loss: Any, parallelism: Any) -> None:
    inner = inner_loss(loss)
    if isinstance(inner, ObjectiveLoss.Config):
        build_objective(inner)
        if (
            inner.objective == "EAFT"
            and parallelism.tensor_parallel_degree > 1
            and parallelism.spmd_backend == "spmd_types"
        ):
            raise UserError(
                "loss.objective=EAFT with parallelism.spmd_backend=spmd_types and tensor parallel: the largest logits lie on several ranks; "
                "set spmd_backend to partial_dtensor"
            )
    elif not isinstance(inner, CrossEntropyLoss.Config):
        raise UserError(
            f"loss={type(inner).__qualname__}: FINCH needs the mean cross-entropy over the target tokens; set CrossEntropyLoss or finch's "
            "ObjectiveLoss, in a ChunkedLossWrapper or not"
        )


def _check_checkpoint(config: Any) -> None:
    """Reads the names in the checkpoint that the run will load, without its tensors."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    folder = _folder_to_load(Path(config.dump_folder) / checkpoint.folder, checkpoint)
    if folder is None or not folder.is_dir() or "lr_scheduler" in checkpoint.exclude_from_loading:
        return
    is_native = (folder / _METADATA).is_file()
    names = FileSystemReader(str(folder)).read_metadata().state_dict_metadata if is_native else {}
    if _FINCH_STATE in names:
        return
    if any(name.startswith(_STATE) for name in names):
        raise UserError(
            f"{folder} is the checkpoint of a run with another scheduler; load it with --checkpoint.exclude_from_loading lr_scheduler, and "
            "FINCH starts as lr_scheduler.init says"
        )
    raise UserError(
        f"{folder} has no state of a scheduler: it holds only the model, as the last step of a finished run; start from it with "
        "--checkpoint.initial_load_path in another --dump_folder, or write it with --checkpoint.no-last_save_model_only"
    )


def _folder_to_load(run: Path, checkpoint: Any) -> Path | None:
    """The checkpoint that the trainer will resume from, chosen as TorchTitan does; None: there is none, or only the model is loaded."""
    steps = [
        int(folder.name.removeprefix("step-"))
        for folder in run.glob("step-*")
        if folder.name.removeprefix("step-").isdigit()
        and any((folder / name).is_file() for name in (_METADATA, _HF_INDEX))
    ]
    step = checkpoint.load_step if checkpoint.load_step != -1 else max(steps, default=-1)
    if step > 0:
        return run / f"step-{step}"
    if step == -1 and checkpoint.initial_load_path and not checkpoint.initial_load_model_only:
        return Path(checkpoint.initial_load_path)
    return None


def _check_pretrained(config: Any) -> None:
    """Compares the model with the config.json of the Hugging Face folder whose weights it will take."""
    folder = pretrained_folder(config)
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(
            f"hf_assets_path={config.hf_assets_path} is not a folder; give the model's Hugging Face folder with --hf_assets_path"
        )
    file = folder / "config.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text())
    model, rope = config.model_spec.model, config.model_spec.model.layers[0].attention.rope
    scaling = rope_settings(settings)
    pairs = {
        "hidden_size": (settings.get("hidden_size"), model.dim),
        "num_hidden_layers": (settings.get("num_hidden_layers"), len(model.layers)),
        "vocab_size": (settings.get("vocab_size"), model.vocab_size),
        "tie_word_embeddings": (is_tied(settings), getattr(model, "enable_weight_tying", is_tied(settings))),
        "rms_norm_eps": (settings.get("rms_norm_eps"), model.norm.eps),
        "rope_theta": (scaling["rope_theta"], rope.theta),
        "rope_type": (_ROPE_TYPES.get(scaling["rope_type"], scaling["rope_type"]), rope.scaling),
    }
    for key, name in _SCALINGS.get(scaling["rope_type"], {}).items():
        pairs[key] = scaling.get(key), getattr(rope, name)
    for key, (in_file, in_model) in pairs.items():
        if in_file is not None and in_file != in_model:
            raise UserError(
                f"{file} has {key}={in_file}, and the model {config.model_spec.name} {config.model_spec.flavor} {in_model}; give the "
                "folder of this model, or the config of that one"
            )
    if (window := attention_window(settings)) is not None and window < config.training.seq_len:
        logger.warning(
            f"{file} has sliding_window={window}, which TorchTitan's model has not: longer rows are trained with more context than the pretrained "
            f"model's; training.seq_len={window} avoids it"
        )
