"""The processes of an evaluation: each answers its share of the documents, and rank 0 gathers and writes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from finch.distributed.processes import die_with_parent

_TIMEOUT = timedelta(weeks=1)  # a rank with short answers waits for one with long ones


class Ranks:
    """This process and its peers; the only one where no launcher started it.

    Documents and results travel as Python objects through gloo, since the devices exchange nothing.
    """

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0
        if self.size > 1 and not distributed.is_initialized():
            die_with_parent()
            distributed.init_process_group("gloo", timeout=_TIMEOUT)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def device(self, name: str | None) -> torch.device:
        """The device of this rank.

        Args:
            name: ``cuda``, ``cpu`` and the like; None: a GPU where there is one.
        """
        if name is None:
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name, self.local_rank) if name == "cuda" else torch.device(name)
