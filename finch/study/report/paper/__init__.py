"""The paper's tables (results.csv, of Appendix B.5 grad_norm.csv) and its Figure 1 (figure1_*.csv), for runs of the same task, model and method.

"Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates", P. P. Prashant, J. Zhu, A. Creo, B. Salimi, 2026. New-task scores in
percent, changes in points.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from finch.models.hf_config import read_settings
from finch.study.report.runs import Run, base_builder

TASKS = ("knowledge", "science", "language")
"""The paper's tasks; its suites have the same names."""
MODELS = {"qwen3_4b": "Qwen3-4B", "llama3_8b": "Llama-3-8B"}
FIGURE = ("knowledge", "qwen3_4b")
"""Task and model of Figure 1."""
METHODS = {"small_lr": "sft_small_lr"}
"""Ours to the paper's where they differ."""
METRICS = {"confidence": "brier"}
"""A task of ours to the paper's column where they differ."""

_SIZES = {  # model_type, hidden_size, num_hidden_layers, vocab_size
    ("qwen3", 2560, 36, 151936): "qwen3_4b",
    ("llama", 4096, 32, 128256): "llama3_8b",
}


@dataclass(frozen=True)
class Curve:
    """A run's, or the paper's: values over steps, or over what the steps add up to."""

    method: str
    steps: Sequence[float]
    values: Sequence[float]
    is_paper: bool = False


def paper_results(task: str | None, model: str | None) -> dict[str, dict[str, float]]:
    """Method to metric to value; a metric is ``task``, an old or a reliability task, or ``avg_delta``. Also of
    ``clip_grad_norm NUMBER``, SFT's of Appendix B.5. Empty without a match."""
    ours = {paper: method for method, paper in METHODS.items()}
    found: dict[str, dict[str, float]] = {}
    for row in _rows("results.csv"):
        if row["task"] == task and row["model"] == model:
            found.setdefault(ours.get(row["method"], row["method"]), {})[row["metric"]] = float(row["value"])
    for row in _rows("grad_norm.csv") if task == "knowledge" else ():
        if row["model"] == model:
            values = {"task": float(row["task_accuracy"]), "avg_delta": float(row["avg_delta"])}
            found[f"clip_grad_norm {float(row['max_grad_norm'])}"] = values
    return found


def accuracy_curves(task: str | None, model: str | None, role: str) -> list[Curve]:
    """In percent, of the role ``new`` or ``old``. Empty where Figure 1 is of another task or model."""
    methods = ("sft", "finch") if (task, model) == FIGURE else ()
    return [_curve("figure1_accuracy.csv", method, f"{method}_{role}", 100.0) for method in methods]


def learning_rate_curves(task: str | None, model: str | None) -> list[Curve]:
    """FINCH's. Empty where Figure 1 is of another task or model."""
    return [_curve("figure1_finch_lr.csv", "finch", "lr")] if (task, model) == FIGURE else []


def _curve(file: str, method: str, column: str, scale: float = 1.0) -> Curve:
    rows = _rows(file)
    values = [scale * float(row[column]) for row in rows]
    return Curve(method, [int(row["step"]) for row in rows], values, is_paper=True)


def paper_model(run: Run) -> str | None:
    """A key of ``MODELS`` where a run's model has the sizes of one: by the config.json of its pretrained weights, else by its builder."""
    folder = (run.config.get("checkpointer") or {}).get("checkpoint_dir")
    if folder is not None:
        try:
            return _by_sizes(read_settings(Path(str(folder)) / "config.json"))
        except (OSError, ValueError):
            pass
    builder = base_builder(run.config)
    return builder if builder in MODELS else None


def _by_sizes(config: Mapping[str, Any]) -> str | None:
    if config.get("model_type") == "llama" and config.get("rope_scaling") is not None:
        return None  # Llama 3.1 and later
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    sizes = tuple(config.get(key) for key in keys)
    return next((name for known, name in _SIZES.items() if known == sizes), None)


def _rows(name: str) -> list[dict[str, str]]:
    text = files("finch.study.report.paper").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
