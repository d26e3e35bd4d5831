"""finch: forgetting-aware fine-tuning for the PyTorch-native stack."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["FinchLR", "ReplayLR", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `finch --help` and config look-ups do not wait for torch.
    if name == "FinchLR":
        from finch.schedule import FinchLR

        return FinchLR
    if name == "ReplayLR":
        from finch.replay import ReplayLR

        return ReplayLR
    raise AttributeError(f"module 'finch' has no attribute {name!r}")
