"""The identity of a run: what must not change when it is resumed. Paths and the number of ranks may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from finch.config.instantiate import component_of
from finch.data.training_data import TrainingData
from finch.training.config_checks import is_objective


def identity_of(cfg: DictConfig, data: TrainingData, seed: int) -> dict[str, Any]:
    """Config keys and properties of the data, with their values as plain JSON; saved in every checkpoint."""
    stats, mixture = data.stats, data.mixture
    return {
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        "checkpointer.checkpoint_dir": Path(cfg.checkpointer.checkpoint_dir).resolve().name,
        "optimizer._component_": component_of(cfg.optimizer),
        "lr_scheduler._component_": component_of(cfg.lr_scheduler),
        "dtype": cfg.dtype,
        "number of samples": len(data.samples),
        "loss": OmegaConf.to_container(cfg.loss, resolve=True) if is_objective(cfg) else "cross-entropy",
        "regularizer": None if cfg.regularizer is None else OmegaConf.to_container(cfg.regularizer, resolve=True),
        "kl_penalty": None if cfg.kl_penalty is None else OmegaConf.to_container(cfg.kl_penalty, resolve=True),
        # Of a mixture, a run of more epochs reads more rows.
        "number of target tokens": stats.num_targets if stats is not None and mixture is None else None,
        "digest of the tokenized rows": f"{stats.first_epoch_digest:016x}" if stats is not None else None,
        "rows of the mixed datasets": None if mixture is None else list(mixture.rows),
        "draws per epoch of the mixed datasets": None if mixture is None else list(mixture.draws),
        "seed": seed,
        "shuffle": cfg.shuffle,
        "global batch": data.order.global_batch,
        "drop_last": cfg.drop_last,
        "max_steps_per_epoch": cfg.max_steps_per_epoch,
    }
