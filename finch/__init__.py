"""finch: forgetting-aware fine-tuning for the PyTorch-native stack."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finch.optim.finch_lr import FinchLR as FinchLR
    from finch.optim.replay_lr import ReplayLR as ReplayLR

__version__ = "0.1.0"
__all__ = ["FinchLR", "ReplayLR", "__version__"]

_LAZY = {"FinchLR": "finch.optim.finch_lr", "ReplayLR": "finch.optim.replay_lr"}


def __getattr__(name: str) -> Any:
    # Imported on first use: `finch --help` and config look-ups do not wait for torch.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'finch' has no attribute {name!r}")
