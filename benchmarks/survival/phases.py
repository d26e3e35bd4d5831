"""What a run is doing, noted by rank 0 beside the run's folder, so that a kill's place is known afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

START = "start"  # nothing has been noted yet
END = "end"


class Phases:
    """Notes what rank 0 is doing; what has begun last counts, since a save runs beside the training."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._active: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        with self._lock:
            self._active.append(name)
            self._note()
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(name)
                self._note()

    def _note(self) -> None:
        os.write(self._descriptor, ((self._active or [END])[-1] + "\n").encode())


def phases_file(run: Path) -> Path:
    return run.with_name(run.name + ".phases")
