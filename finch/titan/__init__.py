"""FINCH inside TorchTitan: a trainer, a scheduler container, config functions, row formats, objectives and probes.

    torchrun --nproc_per_node 8 -m torchtitan.train --module finch.titan --config finch_sft_qwen3_4b

Everything goes through TorchTitan's public seams: subclasses of its components, and hooks that it offers. Needs the extra ``titan``; the
row formats and the probes need ``torchtune`` as well. May import probes and what is below them; must not import sweep, report or cli.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from finch.titan.version import check_version

if TYPE_CHECKING:
    from finch.titan.conversion import to_finch_config as to_finch_config
    from finch.titan.lr_scheduler import FinchLRSchedulersContainer as FinchLRSchedulersContainer
    from finch.titan.trainer import FinchTrainer as FinchTrainer

_LAZY = {
    "FinchLRSchedulersContainer": "finch.titan.lr_scheduler",
    "FinchTrainer": "finch.titan.trainer",
    "to_finch_config": "finch.titan.conversion",
}

__all__ = ["FinchLRSchedulersContainer", "FinchTrainer", "to_finch_config"]


def __getattr__(name: str) -> Any:
    # Imported on first use: TorchTitan takes seconds, and `finch slurm submit` reads the names of the configs without it.
    if name in _LAZY:
        check_version()
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'finch.titan' has no attribute {name!r}")
