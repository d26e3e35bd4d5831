"""Checks of a recipe's config beyond single keys, before weights are loaded: combinations, schedule, loss and output folder."""

from __future__ import annotations

import errno
import inspect
import warnings
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.loss import CEWithChunkedOutputLoss

from finch import FinchLR, ReplayLR
from finch.base import run_files
from finch.base.errors import UserError
from finch.checkpoint.reader import find_resume_candidates
from finch.config.instantiate import build, component_of, locate
from finch.distributed.parallel import launched_ranks
from finch.distributed.precision import precision_of
from finch.objectives import Objective
from finch.objectives.regularization import KL
from finch.optim.optimizer_variants import stochastic_optimizer
from finch.training.kl_penalty import build_kl
from finch.training.optimizer import finch_warning, loss_schedule, torch_schedule

_PLAIN_CROSS_ENTROPY = (nn.CrossEntropyLoss, CEWithChunkedOutputLoss)
_DEFAULT_LOSS_ARGUMENTS = (("ignore_index", -100), ("reduction", "mean"), ("label_smoothing", 0.0))


def check(cfg: DictConfig, device: torch.device, ranks: int | None = None) -> None:
    """Checks schedule and combinations of options; see :func:`check_schedule` and :func:`check_combinations`."""
    check_schedule(cfg)
    check_combinations(cfg, device, ranks)


def check_schedule(cfg: DictConfig) -> str | None:
    """Builds the loss-dependent schedule, so that wrong arguments fail early; returns its warning, which the run repeats with the dataset's loss.
    Raises UserError if an argument is out of its range, or optimizer.lr is not above 0."""
    return _dummy_schedule(cfg)[1]


def _dummy_schedule(cfg: DictConfig) -> tuple[FinchLR | ReplayLR | None, str | None]:
    """A loss-dependent schedule on a dummy optimizer, and its warning."""
    kind, eta_base = loss_schedule(cfg), cfg.optimizer.get("lr")
    has_rate = kind is not None or eta_base is not None  # else the optimizer's own
    if has_rate and not (isinstance(eta_base, (int, float)) and eta_base > 0):
        raise UserError(f"optimizer.lr={eta_base} must be a number above 0, such as 2e-5, the paper's eta_base")
    if kind is None:
        return None, None
    node = {"total_steps": 1, **cfg.lr_scheduler}  # how many is known when the rows are
    if issubclass(kind, FinchLR) and node.get("init", "dataset") == "dataset":
        # The dataset's loss is not known yet, and the other arguments do not depend on it.
        node["init"] = "first_batch"
    with warnings.catch_warnings(record=True, action="always") as caught:
        schedule = build(node, "lr_scheduler", torch.optim.SGD([torch.zeros(1)], lr=float(eta_base)))
    return schedule, finch_warning(caught[0].message) if caught else None


def describe_cap(cfg: DictConfig) -> str:
    """Below which loss FINCH is at its cap; empty for another schedule. Raises UserError as ``check_schedule``."""
    schedule = _dummy_schedule(cfg)[0]
    return f"below {schedule.capped_below:.2g} nats" if isinstance(schedule, FinchLR) else ""


def check_replay(cfg: DictConfig, num_steps: int) -> None:
    """Raises UserError if the log to replay has no learning rate for one of the ``num_steps`` optimizer steps."""
    if loss_schedule(cfg) is not ReplayLR:
        return
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=float(cfg.optimizer.lr))
    try:
        build({"total_steps": num_steps, **cfg.lr_scheduler}, "lr_scheduler", optimizer).check_length(num_steps)
    except ValueError as error:
        raise UserError(f"lr_scheduler: {error}") from error


def check_combinations(cfg: DictConfig, device: torch.device, ranks: int | None = None) -> None:
    """Checks options that exclude or need each other. Raises UserError that names both, and what to set.

    ``ranks``: how many the run has; None: those that torchrun has started.
    """
    if cfg.optimizer_in_bwd and cfg.clip_grad_norm is not None:
        raise UserError(
            f"optimizer_in_bwd=True excludes clip_grad_norm={cfg.clip_grad_norm}: the norm over all gradients is known only after the backward; set "
            "optimizer_in_bwd=False, or clip_grad_norm=null"
        )
    if cfg.optimizer_in_bwd and cfg.gradient_accumulation_steps > 1:
        raise UserError(
            f"optimizer_in_bwd=True excludes gradient_accumulation_steps={cfg.gradient_accumulation_steps}: each backward updates the weights; set "
            "optimizer_in_bwd=False, or gradient_accumulation_steps=1 with a larger batch_size"
        )
    # FSDP2 also wraps a single rank's weights for mixed precision and for offloading.
    is_sharded = (ranks or launched_ranks()) > 1 or precision_of(cfg.dtype).is_mixed or cfg.fsdp_cpu_offload
    if is_sharded and str(component_of(cfg.optimizer)).startswith(("bitsandbytes.", "torch.optim.Adafactor")):
        raise UserError(
            f"optimizer._component_={component_of(cfg.optimizer)} does not update sharded weights (several ranks, dtype=bf16_mixed, fsdp_cpu_offload); use "
            "torchao.optim.AdamW8bit"
        )
    if cfg.tensor_parallel_dim > 1 and cfg.tensor_parallel_plan is None:
        raise UserError(
            f"tensor_parallel_dim={cfg.tensor_parallel_dim} needs tensor_parallel_plan; set it to torchtune.models.llama3.base_llama_tp_plan, or for Qwen3 "
            "to finch.models.qwen3.qwen3_tp_plan"
        )
    if cfg.tensor_parallel_dim > 1 and cfg.compile:
        raise UserError(
            f"compile=True excludes tensor_parallel_dim={cfg.tensor_parallel_dim}: torch cannot trace sharded tensors whose sizes change; set "
            "compile=False, or tensor_parallel_dim=1, FSDP2 shards the model over all ranks"
        )
    if precision_of(cfg.dtype).stochastic:
        stochastic_optimizer(cfg.optimizer)
    if precision_of(cfg.dtype).stochastic or cfg.optimizer.get("bf16_stochastic_round"):
        for key in ("data_parallel_replicate_dim", "tensor_parallel_dim"):
            if cfg[key] > 1:
                raise UserError(
                    f"{key}={cfg[key]} excludes stochastic rounding, which would round the copies of a weight apart; set {key}=1, or dtype=bf16_mixed"
                )
    if cfg.enable_activation_offloading and device.type != "cuda":
        raise UserError("enable_activation_offloading=True needs device=cuda; set it to False")
    if cfg.enable_activation_offloading and not cfg.enable_activation_checkpointing:
        raise UserError("enable_activation_offloading=True needs enable_activation_checkpointing=True; set both")
    if cfg.ac_mode == "selective" and cfg.ac_option is None:
        raise UserError("ac_mode=selective needs ac_option; set it to n for every n-th layer")
    _check_loss(cfg)
    build_kl(cfg)
    if cfg.regularizer is not None and isinstance(build(cfg.regularizer, "regularizer"), KL):
        raise UserError("regularizer._component_=finch.regularization.KL has its own block: name it under kl_penalty")
    if cfg.regularizer is not None and cfg.optimizer_in_bwd:
        raise UserError(
            f"optimizer_in_bwd=True excludes regularizer={component_of(cfg.regularizer)}, whose gradient is added after the backward; set "
            "optimizer_in_bwd=False"
        )
    _check_optimizer(cfg)
    if "left_pad_sequence" in cfg.collate_fn:
        raise UserError(
            f"collate_fn={cfg.collate_fn} pads on the left, which is for inference; use torchtune.data.padded_collate_sft"
        )
    arguments = inspect.signature(locate(cfg.collate_fn, "collate_fn")).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    if not takes_all and not {"padding_idx", "ignore_idx"} <= arguments.keys():
        raise UserError(
            f"collate_fn={cfg.collate_fn} does not take padding_idx and ignore_idx; use torchtune.data.padded_collate_sft"
        )
    if cfg.validate_every_n_steps is not None and cfg.dataset_validation is None and cfg.early_stopping is None:
        raise UserError(
            f"validate_every_n_steps={cfg.validate_every_n_steps} needs dataset_validation; set it, or leave the key out"
        )


def check_lora_combinations(cfg: DictConfig) -> None:
    """Checks options that have no meaning for adapters. Raises UserError that names the option, and what to set."""
    if cfg.tensor_parallel_dim > 1:
        raise UserError(
            f"tensor_parallel_dim={cfg.tensor_parallel_dim} does not cut LoRA layers; set it to 1, FSDP2 shards the model over all ranks"
        )
    if cfg.regularizer is not None:
        raise UserError(
            f"regularizer={component_of(cfg.regularizer)} pulls weights toward the pretrained ones, which LoRA leaves as they are; set it to null"
        )


def check_text_decoder(model: nn.Module, component: str) -> None:
    """Raises UserError if the model is no text decoder; multimodal models and encoders have other inputs."""
    if not isinstance(model, TransformerDecoder):
        raise UserError(
            f"model._component_={component} builds a {type(model).__name__}, and this recipe trains text decoders; give the builder of one"
        )


def check_output_folder(cfg: DictConfig) -> list[Path]:
    """The checkpoints to resume from, in order of preference; empty for a new run.

    Raises UserError if there is none to resume from, or the folder holds another run or lies inside the pretrained model's.
    """
    run = Path(cfg.output_dir)
    try:
        # Asked for, since to `exists` a loop of links is a folder that is not there yet.
        run.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"output_dir={run} is a loop of links; give another folder") from error
    resume = cfg.resume_from_checkpoint
    if resume and cfg.overwrite:
        raise UserError(f"resume_from_checkpoint={resume} excludes overwrite=True, which would remove {run}; set one")
    checkpoints = find_resume_candidates(run, resume)
    is_own = any(run.resolve() in path.resolve().parents for path in checkpoints)
    # Another run's checkpoint goes on in a new folder; where a run is already there, what follows refuses.
    if checkpoints and (is_own or not (run / run_files.METRICS).exists()):
        return checkpoints
    log = cfg.lr_scheduler.get("log") if cfg.lr_scheduler is not None else None
    if (
        cfg.overwrite
        and log is not None
        and run.resolve() in (Path(str(log)).resolve(), Path(str(log)).resolve().parent)
    ):
        raise UserError(f"overwrite=True removes lr_scheduler.log={log}, which is replayed; give another output_dir")
    # With auto a run that was cut off before its first checkpoint starts again.
    if (run / run_files.METRICS).exists() and not cfg.overwrite and resume != "auto":
        raise UserError(
            f"output_dir={run} already holds a run; set resume_from_checkpoint=True to continue it, overwrite=True to replace it, or give another folder"
        )
    base = Path(str(cfg.checkpointer.get("checkpoint_dir", ""))).resolve()
    if cfg.overwrite and run.resolve() in base.parents:
        raise UserError(
            f"overwrite=True would remove checkpointer.checkpoint_dir={base}, which this run starts from; give another output_dir"
        )
    if base == run.resolve() or base in run.resolve().parents:
        raise UserError(
            f"output_dir={run} lies in checkpointer.checkpoint_dir={base}, whose files would mix with the run's; give another folder"
        )
    return []


def is_objective(cfg: DictConfig) -> bool:
    """Whether the ``loss`` block names one of finch.objectives."""
    component = locate(cfg.loss["_component_"], "loss")
    return isinstance(component, type) and issubclass(component, Objective)


def _check_loss(cfg: DictConfig) -> None:
    if is_objective(cfg):
        build(cfg.loss, "loss")
        return
    if locate(cfg.loss["_component_"], "loss") not in _PLAIN_CROSS_ENTROPY:
        raise UserError(
            f"loss._component_={component_of(cfg.loss)} is not a plain cross-entropy; use torch.nn.CrossEntropyLoss, "
            "torchtune.modules.loss.CEWithChunkedOutputLoss, or one of finch.objectives"
        )
    for key, value in cfg.loss.items():
        if key not in ("_component_", "num_output_chunks") and (key, value) not in _DEFAULT_LOSS_ARGUMENTS:
            raise UserError(f"loss.{key}={value} changes plain cross-entropy, which this recipe computes; remove it")


def _check_optimizer(cfg: DictConfig) -> None:
    """Builds optimizer and torch's schedulers on a dummy parameter, so that wrong arguments fail early."""
    optimizer = build(cfg.optimizer, "optimizer", [nn.Parameter(torch.zeros(1))])
    if cfg.lr_scheduler is not None and loss_schedule(cfg) is None:
        with warnings.catch_warnings(action="ignore"):
            torch_schedule(cfg, [optimizer], num_steps=100)
