"""Compares two runs: weights and metrics bit for bit, and no file more or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finch import run_files
from finch.checkpoint.reader import list_checkpoints

TIMING = "tokens_per_second_per_gpu"  # differs between any two runs
IGNORED = (run_files.LOCK, run_files.REQUEUE)  # they say how a run was started and ended


def differences(run: Path, reference: Path) -> list[str]:
    """The differences of ``run`` from ``reference``; empty: they are the same run.

    Compared are every weight of every epoch's folder, bit for bit, the other files of these folders, every line of
    metrics.jsonl except for its timing, the best epoch, the last checkpoint's state.json, and the names of all files. Earlier
    checkpoints are only counted: a run that received SIGTERM has saved at other steps.
    """
    number, expected_number = len(list_checkpoints(run)), len(list_checkpoints(reference))
    names, expected = _names(run), _names(reference)
    result = [] if number == expected_number else [f"{number} complete checkpoints instead of {expected_number}"]
    result += [f"{name} is missing" for name in sorted(expected - names)]
    result += [f"{name} is left over" for name in sorted(names - expected)]
    for name in sorted(names & expected):
        one, other = _parts(run / name), _parts(reference / name)
        result += [f"{name}: {key} differs" for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return result


def _names(run: Path) -> set[str]:
    earlier = list_checkpoints(run)[1:]
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name not in IGNORED and not any(path.is_relative_to(folder) for folder in earlier)
    }


def _parts(path: Path) -> dict[str, Any]:
    """What of a file is compared."""
    if path.is_symlink():
        return {"target": path.readlink()}
    if path.name == run_files.METRICS:
        lines = enumerate(run_files.read_metrics(path), 1)
        return {f"line {number}": {key: line[key] for key in line if key != TIMING} for number, line in lines}
    is_of_epoch = path.parent.name.startswith("epoch_")
    if is_of_epoch and path.suffix == ".safetensors":
        # Bytes, not values: zeros of either sign differ and a NaN equals itself.
        return {
            name: (tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).tolist())
            for name, tensor in load_file(path).items()
        }
    return {"content": path.read_bytes()} if path.is_file() and (is_of_epoch or path.name == "state.json") else {}
