"""The peak of this process's memory, and how much it reads of weight files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from finch.weights.files import StoredTensor

_STATUS = Path("/proc/self/status")
_INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    """Memory that belongs to this process alone. Pages of mapped files are not counted: the system takes them back when it needs them."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class AnonymousPeak:
    """The largest ``anonymous_bytes`` while the context is open, read every 2 ms by a thread.

    Attributes:
        start: in bytes, when the context was opened.
        peak: in bytes.
    """

    def __enter__(self) -> AnonymousPeak:
        self.start = self.peak = anonymous_bytes()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._has_ended.wait(_INTERVAL_S):
            self.peak = max(self.peak, anonymous_bytes())


@contextlib.contextmanager
def count_read_bytes() -> Iterator[list[int]]:
    """Appends the bytes of each part of a weight file that finch reads."""
    num_bytes: list[int] = []
    ordinary = StoredTensor.read

    def counted(stored: StoredTensor, block: tuple[slice, ...]) -> torch.Tensor:
        part = ordinary(stored, block)
        num_bytes.append(part.nbytes)
        return part

    StoredTensor.read = counted  # type: ignore[method-assign,assignment]
    try:
        yield num_bytes
    finally:
        StoredTensor.read = ordinary  # type: ignore[method-assign]
