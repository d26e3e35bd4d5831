"""Whether two runs have left the same: weights and metrics bit for bit, and no file more or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finch.checkpoint.reader import list_checkpoints
from finch.run_files import METRICS, read_metrics

TIMED = "tokens_per_second_per_gpu"  # differs between any two runs
OF_ATTEMPTS = (".lock", "REQUEUE")


def differences(run: Path, reference: Path) -> list[str]:
    """What of ``run`` is not as in ``reference``, in words; empty: they are the same run.

    Compared are every weight of every epoch's folder, bit for bit, the other files of these folders, every line of
    metrics.jsonl but for its time, the best epoch, the last checkpoint's scalars, and the names of all files. The checkpoints
    before the last are counted alone: a run that was asked to leave has saved at other steps.
    """
    found = []
    kept, wanted_number = len(list_checkpoints(run)), len(list_checkpoints(reference))
    if kept != wanted_number:
        found.append(f"there are {kept} whole checkpoints in place of {wanted_number}")
    names, wanted = _names(run), _names(reference)
    found += [f"{name} is missing" for name in sorted(wanted - names)]
    found += [f"{name} is left over" for name in sorted(names - wanted)]
    for name in sorted(names & wanted):
        one, other = run / name, reference / name
        if one.is_symlink() or other.is_symlink():
            if one.readlink() != other.readlink():
                found.append(f"{name} points to {one.readlink()} in place of {other.readlink()}")
        elif name.startswith("epoch_") and one.suffix == ".safetensors":
            found += [f"{name}: {told}" for told in _tensor_differences(load_file(one), load_file(other))]
        elif one.is_file() and (name.startswith("epoch_") or one.name == "state.json"):
            if one.read_bytes() != other.read_bytes():
                found.append(f"{name} has another content")
        elif name == METRICS:
            found += [f"{name}: {told}" for told in _line_differences(read_metrics(one), read_metrics(other))]
    return found


def _names(run: Path) -> set[str]:
    earlier = list_checkpoints(run)[1:]
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name not in OF_ATTEMPTS and not any(path.is_relative_to(folder) for folder in earlier)
    }


def _tensor_differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    found = [f"{name} is in one of the two alone" for name in sorted(one.keys() ^ other.keys())]
    for name in sorted(one.keys() & other.keys()):
        mine, theirs = one[name], other[name]
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            found.append(f"{name} is {mine.dtype} {list(mine.shape)} in place of {theirs.dtype} {list(theirs.shape)}")
            continue
        # Bytes and not values, so that zeros of either sign differ and a NaN equals itself
        differing = (mine.contiguous().view(torch.uint8) != theirs.contiguous().view(torch.uint8)).sum().item()
        if differing:
            found.append(f"{differing} bytes of {name} differ")
    return found


def _line_differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    if len(one) != len(other):
        return [f"{len(one)} lines in place of {len(other)}"]
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True), 1):
        for key in sorted((mine.keys() | theirs.keys()) - {TIMED}):
            if mine.get(key) != theirs.get(key):
                return [f"line {number} has {key} {mine.get(key)} in place of {theirs.get(key)}"]
    return []
