"""Where a task's rows come from: a JSON Lines file under the data root, or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from finch.errors import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Rows of one data set.

    Attributes:
        file: their path under a data root, or a pattern.
        hub: their name on the hub.
        split: on the hub.
        fields: that each row needs.
        config: on the hub; None: it has one only.
    """

    file: str
    hub: str
    split: str
    fields: tuple[str, ...]
    config: str | None = None

    def files(self, data_root: Path) -> list[Path]:
        """The files under a data root that are there and not empty."""
        return [path for path in sorted(data_root.glob(self.file)) if path.is_file() and path.stat().st_size > 0]

    def fetch(self, data_root: Path) -> str:
        """The command that downloads the rows to where they are expected."""
        file = data_root / self.file.replace("*", "rows")
        name = f"{self.hub!r}, {self.config!r}" if self.config else f"{self.hub!r}"
        return (
            f"mkdir -p {file.parent} && python -c \"import datasets; datasets.load_dataset({name}, split='{self.split}')"
            f".to_json('{file}')\""
        )

    def load(self, data_root: str | Path | None) -> list[Row]:
        """All rows, in their order.

        Args:
            data_root: None: from the hub.

        Raises:
            UserError: the file is missing or not JSON Lines, a row lacks a field, or the hub cannot be reached.
        """
        rows = self._load_from_hub() if data_root is None else self._load_files(Path(data_root))
        name = self.hub if data_root is None else Path(data_root) / self.file
        for number, row in enumerate(rows, start=1):
            if missing := next((field for field in self.fields if field not in row), None):
                raise UserError(
                    f"{name}: row {number} has no field {missing!r}, only {', '.join(row)}; each row needs {', '.join(self.fields)}"
                )
        return rows

    def _load_files(self, data_root: Path) -> list[Row]:
        files = self.files(data_root)
        if not files:
            raise UserError(f"{data_root / self.file} does not exist or is empty; fetch it: {self.fetch(data_root)}")
        return [dict(row) for file in files for row in _read(file, file.stat().st_mtime_ns)]

    def _load_from_hub(self) -> list[Row]:
        import datasets

        try:
            return datasets.load_dataset(self.hub, self.config, split=self.split).to_list()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.hub} cannot be loaded from the hub ({reason}); give --data-root DIR with {self.file}"
            ) from error


@lru_cache(maxsize=8)  # MMLU's subjects share a file
def _read(file: Path, mtime: int) -> tuple[Row, ...]:
    from finch.data.row_files import read_rows

    return tuple(read_rows(file, "json"))


def table(rows: Sequence[Row]) -> Any:
    """Rows as a ``datasets.Dataset``, as lm-eval takes them."""
    import datasets

    return datasets.Dataset.from_list(list(rows))


def shuffled(count: int, seed: str) -> list[int]:
    """A permutation of 0 ... count - 1 that depends on the text ``seed`` alone, so that it is the same in every file, version and process."""
    return sorted(range(count), key=lambda index: hashlib.blake2b(f"{seed}\n{index}".encode(), digest_size=16).digest())
