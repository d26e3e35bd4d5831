"""The bytes of all live storages by part, and what they were at the peak."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from finch.dtensor import to_local


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    part: str
    time: int


class LiveMemory:
    """Follows storages from their allocation until they are freed.

    A storage belongs to one part for all its life: one that :meth:`assign` gives to another part belonged to it at the peak as well.

    Attributes:
        total: bytes that are live.
        peak: the most that were live since ``reset_peak``.
        peak_phase: the ``phase`` that was given for the storage that made the peak.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._parts: Counter[str] = Counter()
        self._time = 0
        self.total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """The peak is what is live now."""
        self.peak, self.peak_phase, self._peak_time = self.total, "", self._time
        self._at_peak = Counter(self._parts)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each part at the peak, without empty ones."""
        return {part: nbytes for part, nbytes in self._at_peak.items() if nbytes}

    def live(self) -> dict[str, int]:
        """Bytes of each part now, without empty ones."""
        return {part: nbytes for part, nbytes in self._parts.items() if nbytes}

    def add(self, tensor: torch.Tensor, part: str, phase: str = "") -> None:
        """Follows a tensor's storage, if it is not followed yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, functools.partial(self._forget, key))
            self._storages[key] = entry = _Storage(reference, 0, part, 0)
            self._allocate(entry, storage.nbytes(), phase)
        elif known.nbytes != storage.nbytes():
            self.resize(storage, phase)

    def resize(self, storage: torch.UntypedStorage, phase: str = "") -> None:
        """Reads the new size of a storage that was resized in place; one that is not followed is left alone."""
        entry = self._storages.get(storage._cdata)
        if entry is not None:
            self._free(entry)
            self._allocate(entry, storage.nbytes(), phase)

    def assign(self, value: Any, part: str) -> None:
        """Gives the storage of a tensor, of a sharded one the local shard's, to another part; other values are left alone."""
        tensor = to_local(value)
        if isinstance(tensor, torch.Tensor):
            self.add(tensor, part)
            self.assign_storage(tensor.untyped_storage(), part)

    def assign_storage(self, storage: torch.UntypedStorage, part: str) -> None:
        """As :meth:`assign`; one that is not followed is left alone."""
        entry = self._storages.get(storage._cdata)
        if entry is None:
            return
        self._parts[entry.part] -= entry.nbytes
        self._parts[part] += entry.nbytes
        if entry.time <= self._peak_time:  # it is live now and was allocated before the peak: it was live then
            self._at_peak[entry.part] -= entry.nbytes
            self._at_peak[part] += entry.nbytes
        entry.part = part

    def _allocate(self, entry: _Storage, nbytes: int, phase: str) -> None:
        self._time += 1
        entry.nbytes, entry.time = nbytes, self._time
        self._parts[entry.part] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.peak_phase, self._peak_time = self.total, phase, self._time
            self._at_peak = Counter(self._parts)

    def _free(self, entry: _Storage) -> None:
        self._parts[entry.part] -= entry.nbytes
        self.total -= entry.nbytes
        entry.nbytes = 0

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        entry = self._storages.get(key)
        if entry is not None and entry.reference is reference:
            self._free(self._storages.pop(key))
