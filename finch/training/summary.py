"""What a finished run says at its end: which epoch to use, how to load it, steps, tokens and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from finch import run_files
from finch.log import logger
from finch.progress import duration


def log_summary(cfg: DictConfig, best: Mapping[str, Any] | None, *, last: str, start_time: float) -> None:
    """Logs the summary; called on one rank.

    Args:
        cfg: the recipe's config.
        best: ``{"epoch": name, "validation_loss": nats}`` of the best epoch, or None.
        last: the name of the last epoch's folder.
        start_time: of this process, by ``time.perf_counter``; earlier attempts of a resumed run are not counted.
    """
    run, has_validation = Path(cfg.output_dir), cfg.dataset_validation is not None
    for line in epoch_to_use(run, best, last=last, has_validation=has_validation):
        logger.info(line)
    steps = [line for line in run_files.read_metrics(run / run_files.METRICS) if "num_target_tokens" in line]
    tokens = sum(line["num_target_tokens"] for line in steps)
    seconds = duration(time.perf_counter() - start_time)
    logger.info(f"{len(steps):,} steps, {tokens:,} target tokens; {seconds} since this start")


def epoch_to_use(run: Path, best: Mapping[str, Any] | None, *, last: str, has_validation: bool) -> list[str]:
    """The epoch to use, and how to load it; nothing if its folder is elsewhere, as after a resume from another run's checkpoint."""
    epochs = _number(last)
    if best is not None and (run / run_files.BEST).is_symlink():
        chosen = f"best epoch: {_number(best['epoch'])} of {epochs}, validation loss {best['validation_loss']:.4f} nats"
        folder, name = run / run_files.BEST, (run / run_files.BEST).readlink().name
    else:
        reason = "no validation loss was finite" if has_validation else "there are no validation rows"
        chosen = f"last epoch: {epochs} of {epochs}; {reason}"
        folder, name = run / last, last
    if not folder.exists():
        return []
    if name.endswith("_adapter"):
        return [chosen, f'its adapter: peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")']
    adapter = run / f"{name}_adapter"
    beside = f"; its adapter: {adapter}" if adapter.exists() else ""
    return [chosen, f'its model: transformers.AutoModelForCausalLM.from_pretrained("{folder}"){beside}']


def _number(name: str) -> int:
    """From 1, of ``epoch_0`` or ``epoch_0_adapter``."""
    return int(name.split("_")[1]) + 1
