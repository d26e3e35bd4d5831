"""The states of everything random in this process, as plain JSON: Python, NumPy, torch on the CPU and on this rank's GPU."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def state(device: torch.device) -> dict[str, Any]:
    """The states now. ``device``: this rank's."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    return found


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Goes on where ``state`` was taken. A GPU's state is left as it is where none was saved."""
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(saved["torch"]))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(_bytes(saved["cuda"]), device)


def seed(text: str) -> None:
    """Starts everything random anew from a text, with torch's generators on every device."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
