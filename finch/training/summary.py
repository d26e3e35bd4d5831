"""What a finished run says at its end: which epoch to use, how to load it, what was forgotten, steps, tokens and time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from finch import run_files
from finch.log import logger
from finch.progress import duration
from finch.training.selection import describe_best


def log_summary(
    cfg: DictConfig,
    best: Mapping[str, Any] | None,
    *,
    last: str,
    start_time: float,
    select_by: str | None,
    probe_seconds: float = 0.0,
    budget: str = "",
) -> None:
    """Logs the summary; called on one rank.

    Args:
        cfg: the recipe's config.
        best: ``{"epoch": name, metric: value}`` of the best epoch, or None.
        last: the name of the last epoch's folder.
        start_time: of this process, by ``time.perf_counter``; earlier attempts of a resumed run are not counted.
        select_by: the metric that the best epoch is chosen by; None: there is none.
        probe_seconds: spent on probes since ``start_time``.
        budget: what became of the forgetting budget; empty without one.
    """
    run = Path(cfg.output_dir)
    for line in epoch_to_use(run, best, last=last, select_by=select_by):
        logger.info(line)
    lines = run_files.read_metrics(run / run_files.METRICS)
    for line in forgetting(lines, None if best is None else int(best["epoch"].split("_")[1])):
        logger.info(line)
    if budget:
        logger.info(f"forgetting_budget: {budget}")
    steps = [line for line in lines if "num_target_tokens" in line]
    tokens = sum(line["num_target_tokens"] for line in steps)
    seconds = time.perf_counter() - start_time
    if probe_seconds:
        logger.info(f"probes took {probe_seconds:.1f} s, {probe_seconds / seconds:.1%} of the time since this start")
    logger.info(f"{len(steps):,} steps, {tokens:,} target tokens; {duration(seconds)} since this start")


def epoch_to_use(run: Path, best: Mapping[str, Any] | None, *, last: str, select_by: str | None) -> list[str]:
    """The epoch to use, and how to load it; nothing if its folder is elsewhere, as after a resume from another run's checkpoint."""
    epochs = _number(last)
    if best is not None and (run / run_files.BEST).is_symlink():
        chosen = f"best epoch: {_number(best['epoch'])} of {epochs}, {describe_best(best)}"
        folder, name = run / run_files.BEST, (run / run_files.BEST).readlink().name
    else:
        reason = f"no {select_by.replace('_', ' ')} was finite" if select_by else "there are no validation rows"
        chosen = f"last epoch: {epochs} of {epochs}; {reason}"
        folder, name = run / last, last
    if not folder.exists():
        return []
    if name.endswith("_adapter"):
        return [chosen, f'its adapter: peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")']
    adapter = run / f"{name}_adapter"
    beside = f"; its adapter: {adapter}" if adapter.exists() else ""
    return [chosen, f'its model: transformers.AutoModelForCausalLM.from_pretrained("{folder}"){beside}']


def forgetting(lines: Sequence[Mapping[str, Any]], best_epoch: int | None) -> list[str]:
    """A line for each metric of a probe: its value at step 0, and its change since then at the best epoch and at the last evaluation.

    Args:
        lines: of a metrics.jsonl.
        best_epoch: from 0; None: there is none.
    """
    evaluations = [line for line in lines if any(key.startswith("probe/") for key in line)]
    keys = {
        key: None for line in evaluations for key in line if key.startswith("probe/") and not key.endswith("_change")
    }
    found = []
    for key in keys:
        measured = [line for line in evaluations if line.get(key) is not None]
        at_best = [line for line in measured if line["epoch"] == best_epoch and line["step"] > 0]
        if not measured or measured[-1]["step"] == 0:
            continue
        is_kl = key.endswith("/kl")
        start = "" if is_kl or measured[0]["step"] > 0 else f" {measured[0][key]:.4f} at step 0,"
        change = key if is_kl else f"{key}_change"
        ends = [("at the best epoch", at_best[-1])] if at_best else []
        values = [
            f"{line[change]:+.4f} {place}"
            for place, line in [*ends, (f"at step {measured[-1]['step']}", measured[-1])]
            if line.get(change) is not None
        ]
        found.append(f"{key}:{start} {', '.join(values)}")
    return found


def _number(name: str) -> int:
    """From 1, of ``epoch_0`` or ``epoch_0_adapter``."""
    return int(name.split("_")[1]) + 1
