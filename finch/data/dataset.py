"""From a config's ``dataset`` to rows of tokens and labels, with errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import ListConfig
from torch.utils.data import Dataset
from torchtune.datasets import ConcatDataset, PackedDataset

from finch.config.instantiate import build, component_of
from finch.data.order import EMPTY
from finch.errors import UserError
from finch.objectives import IGNORE_INDEX

REFERENCE_LOSSES = "reference_losses"
"""Key of a row's losses under the pretrained model, [targets] in nats."""


class Samples(Dataset[Any]):
    """A torchtune dataset whose errors name the row, with an extra empty row (index ``EMPTY``) that has no targets.

    Args:
        data: any map-style dataset of ``{"tokens": [...], "labels": [...]}``.
        key: the config key it came from, for error messages.
        source: where its rows come from, for error messages.

    Attributes:
        reference_losses: from a row's index to the pretrained model's losses at its targets, [targets] in nats. Where it is set,
            rows carry them, for the objectives that need them.
    """

    def __init__(self, data: Any, key: str, source: str) -> None:
        self.data, self.key, self.source = data, key, source
        self.reference_losses: Callable[[int], torch.Tensor] | None = None
        if len(data) == 0:
            raise UserError(f"{key} is empty: {source} has no rows; give another file or split")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def packed(self) -> bool:
        return isinstance(self.data, PackedDataset) or bool(getattr(self.data, "packed", False))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == EMPTY:
            labels = self.data[0]["labels"]
            is_tensor = isinstance(labels, torch.Tensor)
            ignored = torch.full_like(labels, IGNORE_INDEX) if is_tensor else [IGNORE_INDEX] * len(labels)
            return self._with_reference_losses({**self.data[0], "labels": ignored}, index)
        try:
            return self._with_reference_losses(self.data[index], index)
        except Exception as error:  # a row can break any library's transform or tokenizer
            raise UserError(
                f"{self.key}: row {index + 1} of {self.source} cannot be used ({_reason(error)}); fix or remove that row"
            ) from error

    def _with_reference_losses(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        return sample if self.reference_losses is None else {**sample, REFERENCE_LOSSES: self.reference_losses(index)}


def load_dataset(cfg: Any, key: str, tokenizer: Any) -> Samples:
    """Builds the dataset under a config key: one component, or a list of them, which is concatenated.

    Raises:
        UserError: the component does not exist, does not accept these arguments, or has no rows.
    """
    node = cfg[key]
    nodes = list(node) if component_of(node) is None else [node]
    parts = [_load_part(part, key, tokenizer) for part in nodes]
    source = " and ".join(_source_of(part) for part in nodes)
    return Samples(parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts), key, source)


def _load_part(node: Any, key: str, tokenizer: Any) -> Any:
    source = _source_of(node)
    for file in _local_files(node):
        if not file.is_file():
            raise UserError(f"{key}.data_files={file} does not exist; correct the path")
        if file.stat().st_size == 0:
            raise UserError(f"{key} is empty: {file} has no rows; give another file")
    try:
        data = build(node, key, tokenizer)
    except UserError as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{key} is empty: {source} has no rows; give another split") from error
        _check_json_lines(node, key)
        if node.get("packed"):
            # Packing tokenizes every row: check the same rows unpacked, where a bad one has a number.
            _check_columns(build({**node, "packed": False}, key, tokenizer), key, source)
        raise
    if len(data) == 0:
        raise UserError(f"{key} is empty: {source} has no rows; give another file or split")
    _check_columns(data, key, source)
    return data


def _local_files(node: Any) -> list[Path]:
    """The data files of a component that are plain paths; patterns and URLs are left to the datasets library."""
    files = node.get("data_files")
    names = [files] if isinstance(files, str) else list(files) if isinstance(files, (list, ListConfig)) else []
    return [Path(name) for name in names if not any(sign in str(name) for sign in ("*", "?", "[", "://"))]


def _source_of(node: Any) -> str:
    files, source, split = node.get("data_files"), node.get("source"), node.get("split")
    name = str(files or source or component_of(node))
    return f"{name} (split {split})" if split not in (None, "train") else name


def _check_columns(data: Any, key: str, source: str) -> None:
    """Finds the first row without a field that the message transform reads, where the rows are a table."""
    inner = data.ds if isinstance(data, PackedDataset) else data
    table: Any = getattr(inner, "_data", None)
    transform = getattr(inner, "_message_transform", None)
    columns = getattr(transform, "column_map", None) or getattr(transform, "_column_map", None)
    if not isinstance(columns, dict) or not hasattr(table, "column_names"):
        return
    for role, column in columns.items():
        if column not in table.column_names:
            raise UserError(
                f"{key}: {source} has no field {column!r}, which column_map names for {role!r}; its fields are {', '.join(table.column_names)}"
            )
        missing = next((row for row, value in enumerate(table[column]) if value is None), None)
        if missing is not None:
            raise UserError(f"{key}: row {missing + 1} of {source} has no field {column!r}; fix or remove that row")


def _check_json_lines(node: Any, key: str) -> None:
    for file in _local_files(node):
        if file.suffix != ".jsonl":
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    json.loads(line.strip() or "null")
                except ValueError as error:
                    raise UserError(
                        f"{key}: row {number} of {file} is not JSON ({error}); fix or remove that row"
                    ) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
