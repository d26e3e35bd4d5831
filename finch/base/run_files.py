"""The files of a run's folder, by name, and how to read its metrics.

RUN/config.yaml                   the resolved config
RUN/metrics.jsonl                 a line per step, and one for each validation and evaluation of the probes
RUN/status.json                   how far the run is, and what has ended it
RUN/epoch_N/                      a Hugging Face folder
RUN/best                          a link to the epoch, or with early_stopping best_step_N, with the lowest validation loss or the best select_by
RUN/within_budget                 a link to the last model inside forgetting_budget: an epoch's, or within_budget_step_N
RUN/checkpoints/step_N/           the state to resume from
RUN/loss.png                      loss, EMA, validation loss, the probes' changes and learning rate over steps
RUN/logs/                         a metric logger's files
RUN/pretrained.safetensors        the pretrained model's losses on the training rows
RUN/pretrained_top_k.safetensors  its most likely tokens there, for a KL penalty with ``reference: cached``
RUN/own_answers_NAME.safetensors  its answers to the prompts of the probe NAME, of kind self
RUN/self_replay.safetensors       its answers that self_replay trains on
RUN/evaluation/                   results of `finch evaluate`: a JSON for each suite, and its samples; in epoch_N/ those of an epoch
RUN/average/                      the model averaged with the pretrained one, by `finch average`, and how its alpha was chosen
RUN/cell.json                     in a sweep: the values of the grid that the run has
RUN/REQUEUE                       empty; there while the run should be started again
RUN/.lock                         held while a run writes here
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from finch.base import status
from finch.base.errors import Unavailable, UserError
from finch.base.files import read_bytes
from finch.base.log import logger

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
STATUS = "status.json"
LOSS_FIGURE = "loss.png"
LOGS = "logs"
BEST = "best"
WITHIN_BUDGET, BUDGET = "within_budget", "forgetting_budget"
CHECKPOINTS = "checkpoints"
REFERENCE_LOSSES = "pretrained.safetensors"
REFERENCE_TOP_K = "pretrained_top_k.safetensors"
SELF_REPLAY = "self_replay.safetensors"
EVALUATION = "evaluation"
AVERAGE = "average"
CELL = "cell.json"
REQUEUE = "REQUEUE"
LOCK = ".lock"
HF_CONFIG = "config.json"

_EPOCH = re.compile(r"epoch_(\d+)(_adapter)?")


def inside(folder: Path, *names: str, is_file: bool = False, is_own: bool = False) -> Path:
    """``folder/NAME/...``, a folder to write to, or with ``is_file`` a file, in a folder that somebody else may have filled. Raises UserError where
    something else has its place, such as a link, which leads elsewhere; with ``is_own`` links are followed."""
    place = folder
    for number, name in enumerate(names, start=1):
        place /= name
        text, is_kind = ("file", os.path.isfile) if is_file and number == len(names) else ("folder", os.path.isdir)
        if os.path.lexists(place) and (not is_kind(place) or (place.is_symlink() and not is_own)):
            raise UserError(f"{place} is no {text}, and finch writes a {text} there; remove it")
    return place


def chosen_model(run: Path) -> Path | None:
    """The model of a run: ``within_budget`` where the budget has ended it, else ``best``, else that of the last epoch, a complete model before an
    adapter; None: there is none."""
    if (run / WITHIN_BUDGET).is_dir() and str(status.read(run / STATUS)["stopped_by"]).startswith(BUDGET):
        return run / WITHIN_BUDGET
    if (run / BEST).is_dir():
        return run / BEST
    epochs = epoch_folders(run)
    return epochs[max(epochs)] if epochs else None


def is_epoch(name: str) -> bool:
    """Whether a folder's name is that of an epoch's model or adapter."""
    return _EPOCH.fullmatch(name) is not None


def epoch_folders(run: Path) -> dict[tuple[int, bool], Path]:
    """The folders of models by epoch, and whether they are complete models."""
    return {
        (int(match[1]), match[2] is None): path
        for path in run.glob("epoch_*")
        if (match := _EPOCH.fullmatch(path.name)) and path.is_dir()
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl without those that cannot be read, such as the last one of a run that was killed; logs which others that leaves
    out. Raises UserError where there is no such file."""
    return [line for line in metrics_lines(path) if line is not None]


def capped_share(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """In which share of its steps FINCH was at its cap; None: no step is FINCH's."""
    is_capped = [line.get("lr_is_capped", False) for line in lines if line.get("ema_loss") is not None]
    return fmean(is_capped) if is_capped else None


def metrics_lines(path: Path) -> list[dict[str, Any] | None]:
    """All lines, as :func:`read_metrics` reads them, with None in the place of one that cannot be read."""
    try:
        texts = read_bytes(path).splitlines()
    except OSError as error:
        raise Unavailable(f"{path} cannot be read ({error.strerror}); restore it, or move it away") from error
    found = [_metrics_line(text) for text in texts]
    damaged = [number for number, line in enumerate(found[:-1], start=1) if line is None]
    if damaged:
        rest = f" and {len(damaged) - 1} other lines" if len(damaged) > 1 else ""
        logger.warning(f"{path}: line {damaged[0]}{rest} cannot be read as a step's and is left out")
    return found


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    # A damaged line can also be nested deeper than the reader descends.
    except (ValueError, RecursionError):
        return None
    # By its type, since JSON's true would pass for the integer 1.
    is_whole = isinstance(line, dict) and type(line.get("step")) is int and all(map(_is_number, line.values()))
    return line if is_whole else None


def _is_number(value: Any) -> bool:
    # False as well for NaN, for an integer that is too large for float(), and for what no fp32 can be: sums of it would overflow.
    return value is None or (isinstance(value, (int, float)) and abs(value) <= 1e100)


def add_dose(total: float, line: Mapping[str, Any]) -> float:
    """``eta_sqrt_loss_sum`` after a line of metrics.jsonl, which older ones lack; NaN where lines were lost."""
    known = line.get("eta_sqrt_loss_sum", total + (line.get("eta_sqrt_loss") or 0.0))
    return math.nan if known is None else known


def is_event(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is not a step's: a validation or an evaluation of the probes."""
    return any(key.startswith(("validation", "probe")) for key in line)
