"""The learning-rate schedule a config asks for: FINCH, a replay, torch's and torchtune's schedulers, or a constant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

from omegaconf import DictConfig
from torch.optim import Optimizer

from finch import FinchLR, ReplayLR
from finch.config.instantiate import build, component_of, locate
from finch.log import logger
from finch.optim.torch_lr import TorchLR

Schedule: TypeAlias = FinchLR | ReplayLR | TorchLR
_UNLIMITED = 10**9


def loss_schedule(cfg: DictConfig) -> type[FinchLR | ReplayLR] | None:
    """The class of ``lr_scheduler`` if it is stepped with the loss, before the optimizer; None for torch's schedulers or none."""
    path = component_of(cfg.lr_scheduler)
    component = None if path is None else locate(path, "lr_scheduler")
    return component if isinstance(component, type) and issubclass(component, (FinchLR, ReplayLR)) else None


def is_finch(cfg: DictConfig) -> bool:
    kind = loss_schedule(cfg)
    return kind is not None and issubclass(kind, FinchLR)


def uses_dataset_init(cfg: DictConfig) -> bool:
    """Whether FINCH's EMA starts at the pretrained model's mean loss: ``init: dataset``, the default, as in the paper."""
    return is_finch(cfg) and cfg.lr_scheduler.get("init", "dataset") == "dataset"


def on_nonfinite(cfg: DictConfig) -> str:
    """What the run does about a non-finite loss: the recipe's key, else the schedule's own."""
    if cfg.on_nonfinite is None and loss_schedule(cfg) is not None:
        return cfg.lr_scheduler.get("on_nonfinite", "raise")
    return cfg.on_nonfinite or "raise"


def build_schedule(
    cfg: DictConfig, optimizers: Sequence[Optimizer], *, init: float | str | None, num_steps: int
) -> Schedule:
    """
    Args:
        init: FINCH's Lbar_0.
        num_steps: of the complete run, for schedulers with an end.
    """
    action = on_nonfinite(cfg)
    nonfinite: dict[str, Any] = {} if action == "raise" else {"on_nonfinite": "skip"}
    if action == "rollback":  # the recipe counts
        nonfinite["max_nonfinite"] = _UNLIMITED
    if loss_schedule(cfg) is None:
        scheduler = None
        if cfg.lr_scheduler is None:
            logger.info(f"constant learning rate {float(optimizers[0].param_groups[0]['lr']):g}")
        else:
            scheduler = build(
                cfg.lr_scheduler, "lr_scheduler", optimizers[0], num_training_steps=num_steps, last_epoch=-1
            )
        return TorchLR(optimizers, scheduler, **nonfinite)
    node = {**cfg.lr_scheduler, **nonfinite}
    if action == "raise" and "on_nonfinite" in node:
        node["on_nonfinite"] = "raise"
    if not is_finch(cfg):
        shape = cfg.lr_scheduler.get("shape", "curve")
        logger.info(f"replaying the learning rates of {cfg.lr_scheduler.log}, shape={shape}")
        return build(node, "lr_scheduler", optimizers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finch = build({**node, "init": init}, "lr_scheduler", optimizers)
    for warning in caught:
        logger.warning(str(warning.message))
    start = f", EMA starts at {init:.4f} nats" if isinstance(init, float) else ""
    logger.info(
        f"FINCH: eta_base {finch.eta_base:g}, eta_max {finch.eta_max:g} "
        f"(reached below {(finch.eta_base / finch.eta_max) ** 2:.2g} nats), ema {finch.ema:g}{start}"
    )
    return finch
