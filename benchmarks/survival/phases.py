"""What a run is doing, appended by rank 0 to a file beside the run's folder, so that the place of a kill is known afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

START = "start"  # nothing has been written yet
END = "end"


class Phases:
    """Writes the current phase at every change: the one that began last, since a save runs beside the training."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._active: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._lock:
            self._active.append(name)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(name)
                self._write()

    def _write(self) -> None:
        os.write(self._descriptor, ((self._active or [END])[-1] + "\n").encode())


def phases_file(run: Path) -> Path:
    return run.with_name(run.name + ".phases")
