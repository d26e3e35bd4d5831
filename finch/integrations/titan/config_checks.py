"""What a FINCH run of TorchTitan refuses before anything is built."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.base.log import logger
from finch.integrations.titan.checkpoints import (
    FINCH_STATE,
    SCHEDULER_STATE,
    complete_steps,
    folder_of,
    folder_to_load,
    names_in,
    way_to_resume,
)
from finch.integrations.titan.dataloader import TOFU, RowsDataLoader
from finch.integrations.titan.losses import ObjectiveLoss, build_objective, inner_loss
from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer, build_schedule
from finch.integrations.titan.recipe_config import RECIPE_KEYS, pretrained_folder
from finch.models.hf_config import attention_window, is_tied, read_json, rope_settings
from finch.weights.files import SAFETENSORS_INDEX, open_safetensors

_ROWS_STATE = "dataloader.dp_rank_"
_UNUSED, _LAYER = re.compile(r"rotary_emb\.inv_freq$|^mtp\."), re.compile(r"\blayers\.(\d+)\.")
_SIZES = tuple(
    f"{name}_degree"
    for name in ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
)
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
    if config.training.enable_cpu_offload:
        raise UserError(
            "training.enable_cpu_offload=True is not supported: TorchTitan leaves the gradients' norm on the CPU, and FINCH reads it on the device; "
            "leave it out"
        )
    _check_schedule(config)
    _check_loss(config.loss, config.parallelism)
    _check_checkpoint(config)
    _check_pretrained(config)
    _check_weights(config)
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
    ranks, sizes = int(os.environ.get("WORLD_SIZE", 0)), {name: getattr(parallelism, name) for name in _SIZES}
    given = math.prod(size for size in sizes.values() if size != -1)
    if ranks and (given < 1 or ranks % given or (-1 not in sizes.values() and ranks != given)):
        named = ", ".join(f"parallelism.{name}={size}" for name, size in sizes.items() if size != 1)
        raise UserError(f"{named}: together {given}, which does not divide over {ranks} ranks; correct one of them")


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
    if settings.init == "dataset" and not isinstance(config.dataloader, RowsDataLoader.Config):
        raise UserError(
            f"lr_scheduler.init=dataset would read all of {type(config.dataloader).__qualname__} before the first step; set first_batch, or a "
            "number of nats"
        )
    if config.training.max_norm <= 0:
        raise UserError(
            f"training.max_norm={config.training.max_norm} makes every gradient 0 in TorchTitan; set a number above 0, or inf for no clipping"
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
    checkpoint, run = config.checkpoint, folder_of(config)
    folder = folder_to_load(config)
    if folder is None or not folder.is_dir():
        if not (
            checkpoint.enable and (checkpoint.initial_load_in_hf or checkpoint.initial_load_path or complete_steps(run))
        ):
            logger.warning(
                "the model starts with random weights: checkpoint.initial_load_in_hf, with checkpoint.enable, loads those of hf_assets_path"
            )
        return
    names, excluded = names_in(folder), checkpoint.exclude_from_loading
    parallelism = config.parallelism
    others = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    ranks, given = int(os.environ.get("WORLD_SIZE", 0)) // others, sum(name.startswith(_ROWS_STATE) for name in names)
    is_of_any = given == 1 and isinstance(config.dataloader, RowsDataLoader.Config)  # number of ranks
    if ranks and given not in (0, ranks) and not is_of_any and "dataloader" not in excluded:
        raise UserError(
            f"{folder} is of {given} data-parallel ranks, and this run has {ranks}: TorchTitan divides the rows otherwise; start {given}, or the rows "
            "anew with --checkpoint.exclude_from_loading dataloader"
        )
    if FINCH_STATE in names or "lr_scheduler" in excluded:
        return
    if any(name.startswith(SCHEDULER_STATE) for name in names):
        raise UserError(
            f"{folder} is the checkpoint of a run with another scheduler; load it with --checkpoint.exclude_from_loading lr_scheduler, and "
            "FINCH starts as lr_scheduler.init says"
        )
    raise UserError(
        f"{folder} has no state of a scheduler: it holds only the model, as the last step of a finished run; {way_to_resume(config)}, or start from "
        "it with --checkpoint.initial_load_path in another --dump_folder"
    )


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
    attention, heads = model.layers[0].attention, settings.get("num_attention_heads")
    if isinstance(attention, GQAttention.Config):
        qkv, size = attention.qkv_linear, settings.get("hidden_size", 0) // heads if heads else None
        pairs |= {
            "num_attention_heads": (heads, attention.n_heads),
            "num_key_value_heads": (
                settings.get("num_key_value_heads", heads),
                attention.n_kv_heads or attention.n_heads,
            ),
            "head_dim": (settings.get("head_dim") or size, attention.head_dim or model.dim // attention.n_heads),
            "attention_bias": (settings.get("attention_bias"), (getattr(qkv, "wqkv", None) or qkv.wq).bias),
        }
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


def _check_weights(config: Any) -> None:
    """Compares the names of the model's weights with those in Hugging Face's form: what TorchTitan's adapter leaves out is neither read nor
    exported. The model is built without memory."""
    checkpoint, spec, folder = config.checkpoint, config.model_spec, pretrained_folder(config)
    is_exported = checkpoint.enable and (checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf)
    if not is_exported or spec.state_dict_adapter is None:
        return
    with torch.device("meta"):
        model = spec.model.build()
    state, adapter, asked = model.state_dict(), spec.state_dict_adapter(spec.model, None), {}
    try:
        asked = adapter.to_hf(dict(state))
        kept = adapter.from_hf(dict(asked)).keys() | dict(model.named_buffers()).keys()
        lost = [name for name in state if name not in kept]
    except KeyError as error:
        lost = [error.args[0]]
    if lost:
        raise UserError(
            f"model_spec={spec.name} {spec.flavor}: TorchTitan leaves {len(lost)} weights, such as {lost[0]}, out of Hugging Face folders, which would "
            "not be the trained model; train without them, or LoRA with finch's recipe"
        )
    if folder is None or checkpoint.initial_load_in_hf_quantized:
        return
    tied = {"lm_head.weight"} if getattr(spec.model, "enable_weight_tying", False) else set()
    unread = [name for name in sorted(_stored(folder) - asked.keys() - tied) if not _UNUSED.search(name)]
    # Layers after the last one predict further tokens; TorchTitan's models do not.
    unread = [name for name in unread if int((_LAYER.findall(name) or [0])[0]) < len(spec.model.layers)]
    if unread:
        raise UserError(
            f"{folder} has {len(unread)} weights, such as {unread[0]}, that the model {spec.name} {spec.flavor} does not take; give the folder of this "
            "model, or the config of that one"
        )


def _stored(folder: Path) -> set[str]:
    """The names of a Hugging Face folder's weights."""
    if (folder / SAFETENSORS_INDEX).is_file():
        return set(read_json(folder / SAFETENSORS_INDEX)["weight_map"])
    return {name for file in folder.glob("*.safetensors") for name in open_safetensors(file).keys()}  # noqa: SIM118 (not a dict)
