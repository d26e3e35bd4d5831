"""From a config's ``dataset`` to rows of tokens and labels, with errors that name the row."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset
from torchtune.datasets import ConcatDataset, PackedDataset

from finch.base.errors import UserError
from finch.config.instantiate import build, component_of
from finch.data.formats import LABELS, format_of
from finch.data.order import EMPTY
from finch.data.row_files import SOURCES, check_arguments, nodes_of
from finch.data.rows import files_and_source, load_from_hub, load_table, reason_of
from finch.distributed.parallel import Parallel
from finch.objectives import IGNORE_INDEX

STATISTICS = ("tokens", "labels", "input_pos", "seq_lens")
"""Keys of a sample that statistics read."""
REFERENCE_LOSSES = "reference_losses"
"""Key of a row's losses under the pretrained model, [targets] in nats."""


@dataclass(frozen=True, order=True)
class Row:
    """Where a row of a dataset is: ``index`` in the dataset, from 0, and ``number`` in its source, from 1, a file or a name on the hub."""

    index: int
    number: int
    source: str

    def __str__(self) -> str:
        return f"row {self.number} of {self.source}"


class Samples(Dataset[Any]):
    """A torchtune dataset whose errors name the row, with an extra empty row (index ``EMPTY``) that has no targets.

    Args:
        data: any map-style dataset of ``{"tokens": [...], "labels": [...]}``.
        key, source: the config key and where its rows come from, for error messages.

    Attributes:
        parts: the datasets that ``data`` concatenates, or ``data`` itself, and where the rows of each come from.
        rows: the indices of the rows that the run reads; all of them, except in a mixture.
        draws: [rows of data] int64, how often a mixture's first epoch draws each row; None: there is no mixture.
        lengths: [rows of data] int32, tokens of each row, 0 of those that the run does not read; None: the rows have not been read.
        content: [rows of data] int64, a hash of each row's tokens and labels, 0 of those that the run does not read; None: as ``lengths``.
        reference_losses: from a row's index to the pretrained model's losses at its targets, [targets] in nats. Where it is set,
            rows carry them, for the objectives that need them.
    """

    def __init__(self, data: Any, key: str, source: str, parts: list[tuple[Any, str]] | None = None) -> None:
        self.data, self.key, self.source = data, key, source
        self.parts = parts or [(data, source)]
        self.rows: Sequence[int] = range(len(data))
        self.draws: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None
        self.content: torch.Tensor | None = None
        self.reference_losses: Callable[[int], torch.Tensor] | None = None
        if len(data) == 0:
            raise UserError(f"{key} is empty: {source} has no rows; give another file or split")

    def __len__(self) -> int:
        return len(self.data)

    def first_equal(self) -> torch.Tensor:
        """[rows of data] int64, the first row with the same tokens and labels; the row itself if they have not been read."""
        if self.content is None:
            return torch.arange(len(self))
        _, first, inverse = np.unique(self.content.numpy(), return_index=True, return_inverse=True)
        return torch.from_numpy(first[inverse])

    @property
    def packed(self) -> bool:
        # torchtune's ConcatDataset says in it whether all that it joins are packs.
        return isinstance(self.data, PackedDataset) or bool(getattr(self.data, "packed", False))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == EMPTY:
            # A copy of a real row, so that every collator can batch it, with whatever keys the dataset has.
            labels = self.data[0]["labels"]
            is_tensor = isinstance(labels, torch.Tensor)
            ignored = torch.full_like(labels, IGNORE_INDEX) if is_tensor else [IGNORE_INDEX] * len(labels)
            return self._with_reference_losses({**self.data[0], "labels": ignored}, index)
        try:
            return self._with_reference_losses(_row_by_row(self.data[index]), index)
        except Exception as error:  # a row can break any library's transform or tokenizer
            raise UserError(
                f"{self.key}: {self.row(index)} cannot be used ({self.reason(index, error)}); fix or remove that row"
            ) from error

    def arrays(self, index: int) -> Mapping[str, Any]:
        """A row's tensors or arrays as statistics need them, which is faster for rows that were tokenized at once. Raises as ``[index]``."""
        data, local_index, _ = self.part_of(index)
        tokenized = getattr(data, "tokenized", None)
        if tokenized is None or tokenized.error(local_index) is not None:
            return {name: np.asarray(value) for name, value in self[index].items() if name in STATISTICS}
        return tokenized.arrays(local_index)

    def check_ranks(self, parallel: Parallel) -> None:
        """Raises UserError, on every rank, if the ranks have read other rows; a collective."""
        parts = [getattr(_table_of(data)[0], "parts", ()) for data, _ in self.parts]
        # Of files size and hash; the hub's fingerprints depend on the cache's folder.
        contents = [[getattr(part, "key", len(part)) for part in each] for each in parts]
        parallel.require_equal(f"rows of {self.key}", (len(self), contents))

    def part_of(self, index: int) -> tuple[Any, int, str]:
        """The dataset that a row belongs to, the row's index there, and where it comes from."""
        for data, source in self.parts:
            if index < len(data):
                return data, index, source
            index -= len(data)
        return self.data, index, self.source

    def row(self, index: int, position: int = 0) -> Row:
        """Where a row is: that of a sample, or the one at ``position`` in its pack. A held-out share of the rows keeps the numbers of its file."""
        data, local_index, source = self.part_of(index)
        if isinstance(data, PackedDataset):
            if data.split_across_pack:
                return Row(index, local_index + 1, f"the packs of {source}")
            # Packs hold the rows in their order, each as a whole: those of earlier packs come before it.
            local_index = sum(len(row_lengths(pack)) for pack in data.packs[:local_index]) + position
            data = data.ds
        origin = getattr(data, "origin", None)
        file, number = (None, local_index + 1) if origin is None else origin(local_index)
        return Row(index, number, file or source)

    def reason(self, index: int, error: Exception) -> str:
        """Why a row cannot be used, in one line."""
        data, local_index, _ = self.part_of(index)
        table, columns = _table_of(data)
        if table is not None and not isinstance(data, PackedDataset):
            # Libraries fail on a null field in their own ways; the user needs its name.
            row = table[local_index]
            missing = next((name for role, name in columns.items() if role != "image" and row.get(name) is None), None)
            if missing is not None:
                return f"its field {missing!r} is missing or null"
        return reason_of(error)

    def _with_reference_losses(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        return sample if self.reference_losses is None else {**sample, REFERENCE_LOSSES: self.reference_losses(index)}


def _row_by_row(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample; in a pack each row's positions start at 0, and its first token is no target, since the token before it is another row's."""
    if "seq_lens" not in sample:
        return sample
    starts = torch.as_tensor(sample["seq_lens"]).cumsum(0)[:-1]
    sample = {**sample, "labels": torch.as_tensor(sample["labels"]).index_fill(0, starts, IGNORE_INDEX)}
    if "input_pos" in sample:
        # torchtune continues those of a split row from the pack before, modulo max_seq_len: they would wrap within the row.
        *others, last = row_lengths(sample)
        last = len(sample["labels"]) - sum(others)  # with the padding, whose positions go on
        sample["input_pos"] = torch.cat([torch.arange(number) for number in (*others, last)])
    return sample


def row_lengths(sample: Mapping[str, Any]) -> list[int]:
    """Tokens of a sample, or of each row in a pack."""
    if "seq_lens" not in sample or "input_pos" not in sample:
        return [len(sample["labels"])]
    lengths = torch.as_tensor(sample["seq_lens"]).tolist()
    # torchtune counts padding as a last row, and continues the positions of the row before it.
    is_padded = len(lengths) > 1 and int(sample["input_pos"][sum(lengths[:-1])]) != 0
    return lengths[:-1] if is_padded else lengths


def load_dataset(cfg: Any, key: str, tokenizer: Any) -> Samples:
    """Builds the dataset under a config key: one component, or a list of them, which is concatenated whatever the weights. Raises UserError
    if the component does not exist, does not accept these arguments, or has no rows."""
    return _concatenate([(_load_part(node, key, tokenizer), _source_of(node)) for node in nodes_of(cfg[key])], key)


def _concatenate(parts: list[tuple[Any, str]], key: str) -> Samples:
    packed = {isinstance(data, PackedDataset) for data, _ in parts}
    if len(packed) == 2:
        raise UserError(f"{key}: some entries of the list have packed=True and others not; set it in all of them")
    data = parts[0][0] if len(parts) == 1 else ConcatDataset(datasets=[data for data, _ in parts])
    return Samples(data, key, " and ".join(source for _, source in parts), parts)


def _load_part(node: Any, key: str, tokenizer: Any) -> Any:
    source = _source_of(node)
    check_arguments(node, key)
    try:
        data = _build(node, key, tokenizer)
    except UserError as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{key} is empty: {source} has no rows; give another split") from error
        if node.get("packed"):
            # Packing tokenizes every row: read the same rows unpacked, where a bad one has a number.
            unpacked = _build({**node, "packed": False}, key, tokenizer)
            _check_columns(unpacked, key, source)
            samples = Samples(unpacked, key, source)
            for index in range(len(samples)):
                samples[index]
        raise
    # Without a split the datasets library returns all of them by name.
    if isinstance(getattr(data, "_data", None), Mapping):
        raise UserError(f"{key}.split has no value: {source} has the splits {', '.join(data._data)}; name one")
    if len(data) == 0:
        raise UserError(f"{key} is empty: {source} has no rows; give another file or split")
    _check_columns(data, key, source)
    return data


def _build(node: Any, key: str, tokenizer: Any) -> Any:
    with _one_reader():
        return build(node, key, tokenizer)


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """torchtune's datasets read local files as finch's do; the datasets library would guess the types of their values."""
    names = [name for name in sys.modules if name.startswith("torchtune.datasets.")]
    # Each module has imported the function by name, so that a change in the datasets library would not reach it.
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], "load_dataset")]
    try:
        for module in modules:
            vars(module)["load_dataset"] = _load
        yield
    finally:
        for module in modules:
            vars(module)["load_dataset"] = datasets.load_dataset


def _load(
    source: str, name: str | None = None, *, data_files: Any = None, split: str | None = None, **rest: Any
) -> Any:
    if source in SOURCES.values() and data_files is not None and split is not None and not rest:
        files, _ = files_and_source(source, data_files)
        if files:
            return load_table(source, data_files, files, name=name, split=split)
    return load_from_hub(source, name, data_files=data_files, split=split, **rest)


def _source_of(node: Any) -> str:
    files, source, split = node.get("data_files"), node.get("source"), node.get("split")
    name = str(files or source or component_of(node))
    return f"{name} (split {split})" if split not in (None, "train") else name


def _check_columns(data: Any, key: str, source: str) -> None:
    """Finds the first row without a field that the message transform reads, where the rows are a table."""
    table, columns = _table_of(data)
    if table is None:
        return
    for role, column in columns.items():
        if role == "image" and column not in table.column_names:
            continue  # torchtune's default names it for rows of text as well
        if column not in table.column_names:
            raise UserError(
                f"{key}: {source} has no field {str(column)[:40]!r}, which column_map names for {role!r}; its fields are "
                f"{', '.join(table.column_names)}{_style_of(table[0], key)}"
            )
        if missing := [number for number, value in enumerate(table[column], start=1) if value is None]:
            them = "that row" if len(missing) == 1 else "them"
            raise UserError(f"{key}: {_name(missing, source)} no field {column!r}, or null in it; fix or remove {them}")
    try:
        _message_transform(data)(table[0])
    except Exception as error:  # as in Samples
        if style := _style_of(table[0], key):
            raise UserError(
                f"{key}: row 1 of {source} cannot be used by {type(_message_transform(data)).__name__} ({reason_of(error)}){style}"
            ) from error


def _table_of(data: Any) -> tuple[Any, dict[str, str]]:
    """The table behind a torchtune dataset of messages, None: there is none; and the columns that the message transform says it reads."""
    inner = data.ds if isinstance(data, PackedDataset) else data
    table: Any = getattr(inner, "_data", None)
    transform = _message_transform(data)
    if transform is None or not hasattr(table, "column_names"):
        return None, {}
    columns = getattr(transform, "column_map", None) or getattr(transform, "_column_map", None)
    return table, columns if isinstance(columns, dict) else {}


def _message_transform(data: Any) -> Any:
    return getattr(data.ds if isinstance(data, PackedDataset) else data, "_message_transform", None)


def _style_of(row: Any, key: str) -> str:
    """The end of an error message: the format that a row of another style has, and the component that reads it."""
    found = format_of(row)
    if found is None:
        return ""
    return (
        f"; its rows look like {LABELS[found]}: correct the columns or the style, or set "
        f"{key}._component_=finch.data.rows.rows_dataset"
    )


def _name(rows: Sequence[int], source: str) -> str:
    """``row 3 of rows.jsonl has``, or how many have and the first of their numbers."""
    if len(rows) == 1:
        return f"row {rows[0]} of {source} has"
    return f"{len(rows):,} rows of {source} ({', '.join(map(str, rows[:3]))}{', ...' if len(rows) > 3 else ''}) have"
