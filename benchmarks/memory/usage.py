"""Memory of this process from /proc: its peak, and how much of mapped files it has touched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finch.weights import files

_PROCESS = Path("/proc/self")
_INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    """Memory that belongs to this process alone. Pages of mapped files are not counted: the system takes them back when it needs them."""
    for line in (_PROCESS / "status").read_text().splitlines():
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
def count_touched_bytes() -> Iterator[dict[Path, int]]:
    """Bytes of each safetensors file that this process has touched when finch closes it, in pages of the system (with its
    fault-around of 64 KiB)."""
    touched: dict[Path, int] = {}
    ordinary = files.open_safetensors

    @contextlib.contextmanager
    def watched(file: Path) -> Iterator[Any]:
        with ordinary(file) as content:
            yield content
            touched[file] = _mapped_bytes(file)

    files.open_safetensors = watched
    try:
        yield touched
    finally:
        files.open_safetensors = ordinary


def _mapped_bytes(file: Path) -> int:
    total, is_file = 0, False
    for line in (_PROCESS / "smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the first line of a mapping ends in its path
            is_file = bool(rest) and rest[-1] == str(file)
        elif is_file and name == "Rss:":
            total += int(rest[0]) * 1024
    return total
