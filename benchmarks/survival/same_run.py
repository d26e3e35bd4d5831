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
    result = []
    number, expected_number = len(list_checkpoints(run)), len(list_checkpoints(reference))
    if number != expected_number:
        result.append(f"{number} complete checkpoints instead of {expected_number}")
    names, expected = _names(run), _names(reference)
    result += [f"{name} is missing" for name in sorted(expected - names)]
    result += [f"{name} is left over" for name in sorted(names - expected)]
    for name in sorted(names & expected):
        one, other = run / name, reference / name
        if one.is_symlink() or other.is_symlink():
            if one.readlink() != other.readlink():
                result.append(f"{name} points to {one.readlink()} instead of {other.readlink()}")
        elif name.startswith("epoch_") and one.suffix == ".safetensors":
            result += [f"{name}: {each}" for each in _tensor_differences(load_file(one), load_file(other))]
        elif one.is_file() and (name.startswith("epoch_") or one.name == "state.json"):
            if one.read_bytes() != other.read_bytes():
                result.append(f"{name} has other content")
        elif name == run_files.METRICS:
            lines = _line_differences(run_files.read_metrics(one), run_files.read_metrics(other))
            result += [f"{name}: {each}" for each in lines]
    return result


def _names(run: Path) -> set[str]:
    earlier = list_checkpoints(run)[1:]
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name not in IGNORED and not any(path.is_relative_to(folder) for folder in earlier)
    }


def _tensor_differences(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    result = [f"{name} is only in one of the two" for name in sorted(tensors.keys() ^ expected.keys())]
    for name in sorted(tensors.keys() & expected.keys()):
        one, other = tensors[name], expected[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            result.append(f"{name} is {one.dtype} {list(one.shape)} instead of {other.dtype} {list(other.shape)}")
            continue
        # Bytes, not values: zeros of either sign differ and a NaN equals itself.
        number = (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum().item()
        if number:
            result.append(f"{number} bytes of {name} differ")
    return result


def _line_differences(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    if len(lines) != len(expected):
        return [f"{len(lines)} lines instead of {len(expected)}"]
    for number, (one, other) in enumerate(zip(lines, expected, strict=True), 1):
        for key in sorted((one.keys() | other.keys()) - {TIMING}):
            if one.get(key) != other.get(key):
                return [f"line {number} has {key} {one.get(key)} instead of {other.get(key)}"]
    return []
