"""Compares two runs, or two folders of runs: weights, results and metrics bit for bit, and no file more or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finch.base import run_files
from finch.checkpoint.reader import list_checkpoints

TIMING = "tokens_per_second_per_gpu"  # differs between any two runs
IGNORED = (run_files.LOCK, run_files.REQUEUE)  # they say how a run was started and ended
_CHANGING = (run_files.CONFIG, run_files.STATUS)  # how it was started last, and when it has said so


def differences(folder: Path, reference: Path) -> list[str]:
    """The differences of ``folder`` from ``reference``; empty: they are the same.

    Compared are every weight of every model, bit for bit, the other files of these folders, results, every line of
    metrics.jsonl except for its timing, the best epoch, the last checkpoint's state.json, and the names of all files. Earlier
    checkpoints are only counted: a run that received SIGTERM has saved at other steps.
    """
    result = []
    for run in (path.parent.relative_to(reference) for path in reference.rglob(run_files.CHECKPOINTS)):
        number, expected_number = (len(list_checkpoints(each / run)) for each in (folder, reference))
        if number != expected_number:
            result.append(f"{number} complete checkpoints instead of {expected_number}")
    names, expected = _names(folder), _names(reference)
    result += [f"{name} is missing" for name in sorted(expected - names)]
    result += [f"{name} is left over" for name in sorted(names - expected)]
    for name in sorted(names & expected):
        one, other = _parts(folder / name), _parts(reference / name)
        result += [f"{name}: {key} differs" for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return result


def _names(folder: Path) -> set[str]:
    earlier = [path for each in folder.rglob(run_files.CHECKPOINTS) for path in list_checkpoints(each.parent)[1:]]
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name not in IGNORED
        and path.suffix != ".log"
        and not any(path.is_relative_to(folder) for folder in earlier)
    }


def _parts(path: Path) -> dict[str, Any]:
    """What of a file is compared."""
    if path.is_symlink():
        return {"target": path.readlink()}
    if path.name == run_files.METRICS:
        lines = enumerate(run_files.read_metrics(path), 1)
        return {f"line {number}": {key: line[key] for key in line if key != TIMING} for number, line in lines}
    if path.suffix == ".safetensors":
        # Bytes, not values: zeros of either sign differ and a NaN equals itself.
        return {
            name: (tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).tolist())
            for name, tensor in load_file(path).items()
        }
    is_of_save = run_files.CHECKPOINTS in path.parts and path.name != "state.json"
    is_same = path.is_dir() or is_of_save or path.name in _CHANGING or path.suffix == ".png"
    return {} if is_same else {"content": path.read_bytes()}
