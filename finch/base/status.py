"""How far a program is, as JSON for other programs and for people: RUN/status.json of a run, and FINCH_STATUS_FILE of any command.

Its fields are ``phase``, ``done`` and ``total`` of it (steps of a run, requests of an evaluation), ``seconds_left``, ``error`` (the line
of a mistake, or null), ``stopped_by``, why a run has ended before its last epoch, ``is_finished``, ``is_requeued`` (to be started again),
and ``time``, of the writing, in seconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from finch.base.files import read_object

STATUS_FILE = "FINCH_STATUS_FILE"
_INTERVAL_S = 2.0  # on a network's file system each writing takes milliseconds
_NEW = {"phase": "", "done": 0, "total": None, "seconds_left": None, "error": None, "stopped_by": None}
_NEW |= {"is_finished": False, "is_requeued": False}


class _Status:
    """This process's."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = dict(_NEW)
        self.run_file: Path | None = None
        self.written_at = float("-inf")

    def write(self) -> None:
        self.written_at = time.monotonic()
        text = json.dumps({**self.fields, "time": round(time.time(), 3)}) + "\n"
        named = os.environ.get(STATUS_FILE)
        for file in filter(None, (self.run_file, Path(named) if named else None)):
            partial = file.with_name(f"{file.name}.partial")
            # Renamed, so that nobody reads half of it; not synced: a power cut ends the program that it is about.
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)  # a link would lead elsewhere
                partial.write_text(text, encoding="utf-8")
                partial.replace(file)


_status = _Status()


def follow(file: Path | None) -> None:
    """Begins anew: what this process does from now on is written to ``file`` too."""
    _status.fields, _status.run_file = dict(_NEW), file
    _status.write()


def report(*, now: bool = False, **fields: Any) -> None:
    """Changes fields of the status, and writes it: every other second, or ``now``. Nothing depends on it: what cannot be written is left out."""
    _status.fields |= fields
    if now or time.monotonic() - _status.written_at >= _INTERVAL_S:
        _status.write()


def read(file: Path) -> dict[str, Any]:
    """The status in a file; that of a program that has not begun where there is none, or none that can be read."""
    return {**_NEW, **read_object(file)}
