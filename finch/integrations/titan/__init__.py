"""FINCH inside TorchTitan: a trainer, a scheduler container, config functions, row formats and objectives.

    torchrun --nproc_per_node 8 -m torchtitan.train --module finch.titan --config finch_sft_qwen3_4b

Everything goes through TorchTitan's public interfaces: subclasses of its components, and hooks that it offers. Needs the extra ``titan``;
the row formats need ``torchtune`` as well.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from finch.base.errors import UserError
from finch.base.extras import install_command

if TYPE_CHECKING:
    from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer as FinchLRSchedulersContainer
    from finch.integrations.titan.trainer import FinchTrainer as FinchTrainer
    from finch.integrations.titan.trainer import to_finch_config as to_finch_config

_LAZY = {
    "FinchLRSchedulersContainer": "finch.integrations.titan.lr_scheduler",
    "FinchTrainer": "finch.integrations.titan.trainer",
    "to_finch_config": "finch.integrations.titan.trainer",
}
_LOWEST, _BELOW = (0, 3), (0, 4)  # the versions of TorchTitan whose interfaces are used, as in pyproject.toml

__all__ = ["FinchLRSchedulersContainer", "FinchTrainer", "to_finch_config"]


def __getattr__(name: str) -> Any:
    # Imported on first use: TorchTitan takes seconds, and `finch slurm` reads the names of the configs without it.
    if name in _LAZY:
        check_version()
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'finch.titan' has no attribute {name!r}")


def check_version() -> None:
    """Checks the installed TorchTitan without importing it. Raises UserError if there is none, or it is outside the range."""
    try:
        installed = version("torchtitan")
    except PackageNotFoundError as error:
        raise UserError(f"finch.titan needs torchtitan, which is not installed: {install_command('titan')}") from error
    release = tuple(int(part) if part.isdigit() else -1 for part in installed.split(".")[:2])
    if not _LOWEST <= release < _BELOW:
        lowest, below = (".".join(map(str, bound)) for bound in (_LOWEST, _BELOW))
        raise UserError(
            f"torchtitan={installed} is not supported: finch.titan needs >={lowest},<{below}: {install_command('titan')}"
        )
