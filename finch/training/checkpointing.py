"""The writer of a run's resumable checkpoints, from its config."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from finch.checkpoint.writer import CheckpointWriter
from finch.distributed.parallel import Parallel
from finch.training.lr_scheduler import on_nonfinite


def build_checkpoint_writer(cfg: DictConfig, run: Path, parallel: Parallel) -> CheckpointWriter:
    """A collective where there are several ranks: they form a group for saving.

    Args:
        run: the run's folder.
    """
    return CheckpointWriter(
        run,
        parallel,
        every_n_steps=cfg.checkpoint.every_n_steps,
        every_n_minutes=cfg.checkpoint.every_n_minutes,
        # The last one may hold what is about to diverge: keep another to roll back to.
        keep_last=max(cfg.checkpoint.keep_last, 2 if on_nonfinite(cfg) == "rollback" else 1),
        asynchronous=cfg.checkpoint["async"],
        timeout_s=cfg.distributed_timeout,
    )
