"""What observes a run, from its config: the metrics with their logger, and the profiler. Nothing of an earlier run is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import training

from finch.config.instantiate import build
from finch.distributed.parallel import Parallel
from finch.metrics import MetricsLog
from finch.progress import RunProgress


def build_metrics_log(cfg: DictConfig, run: Path, parallel: Parallel, *, num_steps: int) -> MetricsLog:
    """The metrics of a run of ``num_steps`` optimizer steps, not opened yet.

    Raises:
        UserError: the metric logger cannot be built, most often because its package is not installed.
    """
    metric_logger = None
    if cfg.metric_logger is not None and parallel.is_rank_zero:
        metric_logger = build(cfg.metric_logger, "metric_logger")
    return MetricsLog(
        run,
        metric_logger,
        RunProgress(num_steps, cfg.epochs, is_shown=parallel.is_rank_zero),
        is_writer=parallel.is_rank_zero,
        every=cfg.log_every_n_steps,
        world_size=parallel.world_size,
    )


def build_profiler(cfg: DictConfig) -> Any:
    """torchtune's profiler; one that does nothing if it is off.

    Raises:
        UserError: it cannot be built.
    """
    is_enabled = cfg.profiler is not None and cfg.profiler.get("enabled", False)
    return build(cfg.profiler, "profiler")[0] if is_enabled else training.DummyProfiler()
