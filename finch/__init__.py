"""finch: forgetting-aware fine-tuning for the PyTorch-native stack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
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


class _Aliases:
    """Public paths, which configs, saved runs and others' code name, of modules that lie elsewhere: one module under both names."""

    PATHS = {
        "finch.auto": "finch.plan.auto",
        "finch.cosine": "finch.optim.torch_lr",
        "finch.data.galician_alpaca": "finch.evaluation.datasets.galician_alpaca",
        "finch.data.sciknoweval": "finch.evaluation.datasets.sciknoweval",
        "finch.data.tofu": "finch.evaluation.datasets.tofu",
        "finch.regularization": "finch.objectives.regularization",
        "finch.titan": "finch.integrations.titan",
    }

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        public = next((public for public in self.PATHS if f"{name}.".startswith(f"{public}.")), None)
        if public is None:
            return None
        return ModuleSpec(name, self, origin=self.PATHS[public] + name.removeprefix(public))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = getattr(module.__spec__, "loader_state", None)  # the import system has set the alias's


sys.meta_path.insert(0, _Aliases())  # before the finder of files, which would make second modules of a package's parts
