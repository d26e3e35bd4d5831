"""The collectives of a step: kind, count and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

# Of the two families of operators: torch.distributed's calls and DTensor's functional collectives.
_C10D = {"_allgather_base_": ALL_GATHER, "_reduce_scatter_base_": REDUCE_SCATTER, "allreduce_": ALL_REDUCE}
_FUNCTIONAL = {
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
}
_IGNORED = ("wait_tensor",)


@dataclass(frozen=True)
class Collective:
    """One call on one rank.

    Attributes:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, or the operator's name for another.
        nbytes: of the complete tensor: what an all-gather returns, what the others are given.
        ranks: of its group.
    """

    kind: str
    nbytes: int
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """What a rank sends, and receives, in a ring: (N - 1) / N of the tensor, twice that for an all-reduce."""
        rounds = 2 if self.kind == ALL_REDUCE else 1
        return rounds * self.nbytes * (self.ranks - 1) // self.ranks


def collective_of(function: Any, arguments: Sequence[Any], output: Any) -> Collective | None:
    """The collective that a dispatched operator is; None for any other operator."""
    name = function._overloadpacket.__name__
    if function.namespace == "c10d":
        kind = _C10D.get(name, name)
        ranks = next(ranks for ranks in map(_group_size, arguments) if ranks)
        # The output comes first for those that have one.
        return Collective(kind, _nbytes(arguments[1] if kind == REDUCE_SCATTER else arguments[0]), ranks)
    if function.namespace == "_c10d_functional" and name not in _IGNORED:
        kind = _FUNCTIONAL.get(name, name)
        group = dist.distributed_c10d._resolve_process_group(arguments[-1])
        return Collective(kind, _nbytes(output if kind == ALL_GATHER else arguments[0]), group.size())
    return None


def _group_size(value: Any) -> int:
    """Ranks of a process group as operators take it; 0 for another argument."""
    if isinstance(value, dist.ProcessGroup):
        return value.size()
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value).size()
        except (RuntimeError, TypeError):
            return 0
    return 0


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value))
