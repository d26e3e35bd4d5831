"""A model's answers to the requests of one task, on disk while the task runs, so that an interrupted evaluation continues.

lm-eval's own cache knows neither the model nor the batch: it would give one model's answers to another, and after an interruption
the remaining requests would form other batches, whose rounding differs. Here a file belongs to one model, task and setting, and an
entry to one batch: a continued evaluation forms the same batches, runs those that are missing, and ends with the same bits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from finch.evaluation.fingerprint import hash_values
from finch.files import write_text


class AnswerCache:
    """An append-only file: a line with its key, then a line for each batch.

    Args:
        path: created if it does not exist; replaced if it has another key.
        key: of what changes an answer: weights, settings, the task's definition.

    Attributes:
        num_read: batches that the file held.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._batches = _read(path, key)
        self.num_read = len(self._batches)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"key": key}, *({"batch": name, "answers": answers} for name, answers in self._batches.items())]
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        write_text(partial, "".join(json.dumps(line) + "\n" for line in lines))  # without a last line that was cut off
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    @staticmethod
    def name_batch(requests: Any) -> str:
        """The name of a batch: a hash of its requests, which must be JSON values."""
        return hash_values(requests)

    def get(self, name: str) -> list[Any] | None:
        """The answers of a batch; None if it has not been run."""
        return self._batches.get(name)

    def put(self, name: str, answers: list[Any]) -> None:
        """Keeps a batch's answers. They are safe from the end of this process as soon as this returns."""
        self._batches[name] = answers
        self._file.write(json.dumps({"batch": name, "answers": answers}) + "\n")
        self._file.flush()

    def close(self, *, is_finished: bool) -> None:
        """Closes the file, and removes it when the task's result has been written."""
        self._file.close()
        if is_finished:
            self._path.unlink(missing_ok=True)


def _read(path: Path, key: str) -> dict[str, list[Any]]:
    batches: dict[str, list[Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]) != {"key": key}:
            return {}
        for line in lines[1:]:
            entry = json.loads(line)
            batches[entry["batch"]] = entry["answers"]
    except (OSError, ValueError, KeyError):  # a line that was cut off
        pass
    return batches
