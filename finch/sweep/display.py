"""The cells of a running sweep: a table that is redrawn in a terminal, and lines in a log file."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LINE_INTERVAL_S = 60.0
_PROGRESS = re.compile(r"(\w+ [\d,]+ of [\d,]+)\b.*?(\d+:\d\d:\d\d) left")
_TAIL_BYTES = 20_000


class Display:
    """
    Args:
        names: of all cells.
    """

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names), default=0)
        self._names, self._shown = names, dict.fromkeys(names, "")
        self._is_terminal, self._num_lines = sys.stdout.isatty(), 0
        self._last_time = time.monotonic()

    def update(self, states: Mapping[str, str], progress: Mapping[str, str]) -> None:
        """
        Args:
            states: of each cell, in a few words.
            progress: of the running cells: step and time left.
        """
        if self._is_terminal:
            self._redraw({name: " ".join(filter(None, [states[name], progress.get(name)])) for name in self._names})
            return
        for name in self._names:
            if states[name] != self._shown[name] and (states[name] != "waiting"):
                print(f"{name:<{self._width}}  {states[name]}", flush=True)
            self._shown[name] = states[name]
        if time.monotonic() - self._last_time >= LINE_INTERVAL_S:
            self._last_time = time.monotonic()
            done = sum(not state.startswith(("waiting", "running", "evaluating")) for state in states.values())
            running = ", ".join(f"{name} {text}" for name, text in progress.items() if text)
            print(f"{done} of {len(states)} cells done{'; ' if running else ''}{running}", flush=True)

    def _redraw(self, texts: Mapping[str, str]) -> None:
        size = shutil.get_terminal_size()
        names = list(texts)
        if len(names) > size.lines - 3:  # those that something happens to
            names = [name for name in names if not texts[name].startswith(("waiting", "finished", "evaluated"))]
            names = names[: max(size.lines - 3, 1)]
        lines = [f"{name:<{self._width}}  {texts[name]}"[: size.columns - 1] for name in names]
        if len(names) < len(texts):
            counts = {
                word: sum(text.startswith(word) for text in texts.values())
                for word in ("waiting", "finished", "evaluated")
            }
            lines.append(", ".join(f"{number} {word}" for word, number in counts.items() if number))
        up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J", end="", flush=True)
        self._num_lines = len(lines)


def progress_of(log: Path, start: int = 0) -> str:
    """``step 25 of 300, 0:01:10 left`` of a process's log; empty before its first line of progress.

    Args:
        start: bytes of the log that earlier processes have written.
    """
    matches = _PROGRESS.findall(tail(log, start))
    return f"{matches[-1][0]}, {matches[-1][1]} left" if matches else ""


def last_error(log: Path, start: int) -> str:
    """The reason of a failure: the line of a user's mistake, else the last line.

    Args:
        start: bytes of the log that an earlier attempt has written.
    """
    lines = [line.strip() for line in tail(log, start).replace("\r", "\n").splitlines() if line.strip()]
    errors = [line.removeprefix("finch: error: ") for line in lines if line.startswith("finch: error: ")]
    return (errors or lines or ["no output"])[-1]


def tail(log: Path, start: int = 0) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, start, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
