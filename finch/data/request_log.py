"""The calls of a language model's server and what they cost: an append-only JSON Lines file, from which a later start continues.

Lines, in the order of events:

    {"key": KEY, "reserved": TOKENS}                before a call
    {"key": KEY, "tokens": TOKENS, "text": TEXT}    after it; without text where it failed

A call without a second line was cut off by the end of its process; it may have cost all that was reserved for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from finch.errors import UserError


class RequestLog:
    """Answers by key, and a budget that calls never exceed. Safe for threads; one process at a time.

    Args:
        path: of the file; created if it does not exist. A last line that was cut off is removed.
        budget: tokens that all calls of the file, earlier ones included, may take; None: no limit.

    Attributes:
        path: the same.
        budget: the same.
        answers: text by key.
        tokens: that calls have taken so far.

    Raises:
        UserError: the file is broken, cannot be written, or another process writes it. A full disk raises it later as well.
    """

    def __init__(self, path: Path, budget: int | None = None) -> None:
        self.path, self.budget = path, budget
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another process; wait until it has ended") from error
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give another path") from error
        self.answers, self.tokens, complete_bytes = _read(path)
        os.ftruncate(self._file, complete_bytes)
        self._in_flight = 0  # tokens
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True  # calls that are still in flight after an interrupt
            is_empty = os.fstat(self._file).st_size == 0
            os.close(self._file)
        if is_empty:
            self.path.unlink(missing_ok=True)

    def reserve(self, key: str, tokens: int) -> bool:
        """Records a call before it is made.

        Args:
            tokens: at most that many it can take. Where they do not fit into the budget, calls in flight are waited for: they
                usually take less than was reserved for them.

        Returns:
            Whether the call may be made.
        """
        with self._changed:
            if self._is_closed:
                raise UserError(f"{self.path} cannot be written; start the same command again")
            while self.budget is not None and self.tokens + self._in_flight + tokens > self.budget:
                if self._in_flight == 0:
                    return False
                self._changed.wait()
            self._in_flight += tokens
            self._write({"key": key, "reserved": tokens})
            return True

    def settle(self, key: str, reserved: int, tokens: int, text: str | None = None) -> None:
        """Records a call's end.

        Args:
            reserved: what ``reserve`` was given.
            tokens: it has taken.
            text: its answer; None: it failed.
        """
        with self._changed:
            self._in_flight -= reserved
            self.tokens += tokens
            self._changed.notify_all()
            self._write({"key": key, "tokens": tokens} | ({} if text is None else {"text": text}))
            if text is not None:
                self.answers[key] = text

    def _write(self, line: dict[str, Any]) -> None:
        if self._is_closed:
            return  # a line that was cut off must stay the last one
        try:
            data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            self._is_closed = True
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); make room, then start the same command again"
            ) from error


def read_answers(path: Path) -> dict[str, str]:
    """The answers of a file that may not exist.

    Raises:
        UserError: the file is broken.
    """
    return _read(path)[0] if path.exists() else {}


def _read(path: Path) -> tuple[dict[str, str], int, int]:
    """Answers, tokens taken, and the size of the complete lines in bytes."""
    content = path.read_bytes()
    complete_bytes = content.rfind(b"\n") + 1
    answers: dict[str, str] = {}
    tokens = 0
    reserved: dict[str, list[int]] = {}
    for number, line in enumerate(content[:complete_bytes].splitlines(), start=1):
        try:
            entry = json.loads(line)
            key = entry["key"]
            if "reserved" in entry:
                reserved.setdefault(key, []).append(int(entry["reserved"]))
                continue
            tokens += int(entry["tokens"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: line {number} is not a recorded call; remove that line") from error
        if reserved.get(key):
            reserved[key].pop()
        if "text" in entry:
            answers[key] = entry["text"]
    return answers, tokens + sum(map(sum, reserved.values())), complete_bytes
