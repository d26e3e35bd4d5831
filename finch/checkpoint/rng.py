"""The states of all random number generators of this process as plain JSON: Python, NumPy, torch on the CPU and on this rank's GPU."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def get_state(device: torch.device) -> dict[str, Any]:
    """The current states. ``device``: this rank's."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return state


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores what ``get_state`` returned. A GPU's generator is unchanged where its state was not saved."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_to_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_to_tensor(state["cuda"]), device)


def seed_all(text: str) -> None:
    """Seeds all generators, torch's on every device, from a text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
