"""A dataset of any known row format, from local files or the hub, with a seeded share of it held out for validation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform

from finch.data.formats import AUTO, RowFormat, detect, detect_columns
from finch.data.messages import RowToMessages
from finch.data.row_files import SOURCES, csv_columns, local_files, read_rows, source_of
from finch.errors import UserError

PARTS = ("all", "train", "validation")


class Rows(Dataset[Any]):
    """Rows of a table, tokenized on access as ``{"tokens": [...], "labels": [...]}``.

    Args:
        table: with the columns that the transforms read.
        row_format: its format.
        files: of the rows, where there are several and the table has them all.
        transforms: from a row to tokens and labels, one after the other.

    Attributes:
        row_format: the same.
    """

    def __init__(
        self,
        table: datasets.Dataset,
        row_format: RowFormat,
        files: Sequence[Path],
        transforms: Sequence[Callable[[Any], Any]],
    ) -> None:
        self._data, self._files, self._transforms = table, files, transforms
        self.row_format = row_format

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: Any = self._data[index]
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def origin(self, index: int) -> tuple[str | None, int]:
        """The file that a row of this part comes from, and its number there, from 1; where there are not several files, None and its
        number in the split."""
        indices = self._data._indices
        number = 1 + (index if indices is None else indices.column(0)[index].as_py())
        for file in self._files:
            num_rows = _num_rows(file, self.row_format.source or "json")
            if number <= num_rows:
                return str(file), number
            number -= num_rows
        return None, number


class TextToTokens:
    """Plain text between the tokenizer's BOS and EOS, every token a target, as in torchtune's TextCompletionDataset.

    Args:
        tokenizer: torchtune's.
        column: of the text.
        is_truncated: whether rows end at the tokenizer's max_seq_len; otherwise packing splits them.
    """

    def __init__(self, tokenizer: Any, column: str, *, is_truncated: bool = True) -> None:
        self._tokenizer, self._column = tokenizer, column
        self._limit = tokenizer.max_seq_len if is_truncated else None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text = row.get(self._column)
        if not isinstance(text, str):
            raise UserError(
                f"it has no field {self._column!r}" if text is None else f"its field {self._column!r} is not text"
            )
        tokens = self._tokenizer.encode(text, add_bos=True, add_eos=True)[: self._limit]
        return {"tokens": tokens, "labels": tokens.copy()}


def rows_dataset(
    tokenizer: Any,
    *,
    source: str | None = None,
    data_files: str | list[str] | None = None,
    name: str | None = None,
    split: str = "train",
    format: str = AUTO,
    column_map: dict[str, str] | None = None,
    part: str = "all",
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> Rows | PackedDataset:
    """Rows of any format of ``finch.data.formats.FIELDS``. The train and validation parts of one seed never share a row.

    Args:
        tokenizer: a torchtune model tokenizer.
        source: a hub name, or ``json``, ``csv`` or ``parquet`` for ``data_files``; None: by the extension of ``data_files``.
        data_files: a local path, a pattern, or a list of them; with a hub name, files of that repository.
        name: the hub's configuration.
        split: the hub's or file's split, torchtune's ``train[:400]`` form included.
        format: ``auto``, or a key of ``finch.data.formats.FIELDS``.
        column_map: from the format's fields to columns of other names.
        part: ``all`` rows, ``train`` or ``validation``.
        validation_fraction: share of the rows held out, in (0, 1).
        split_seed: of the permutation that chooses them.
        train_on_input: whether all turns are targets, instead of the assistant's alone.
        new_system_prompt: a system turn before each conversation, instead of its own.
        packed: whether rows are packed to ``tokenizer.max_seq_len``. Plain text is then split across packs, never truncated.

    Raises:
        UserError: rows that cannot be read, of no known format or of another one than ``format``; an argument out of range.
    """
    if part not in PARTS:
        raise UserError(f"dataset.part={part} must be all, train or validation")
    if packed and tokenizer.max_seq_len is None:
        raise UserError("dataset.packed=True needs tokenizer.max_seq_len, the length of a pack; set it")
    if source is None and data_files is None:
        raise UserError("dataset needs data_files, the path of the rows, or source, a name on the hub; set one")
    table, row_format, files = load_rows(
        source, data_files, name=name, split=split, format=format, column_map=column_map
    )
    if part != "all":
        table = hold_out(table, part, validation_fraction, split_seed)
    is_text = row_format.format == "text"
    transforms: list[Callable[[Any], Any]]
    if is_text:
        transforms = [TextToTokens(tokenizer, row_format.columns["text"], is_truncated=not packed)]
    else:
        messages = RowToMessages(row_format, train_on_input=train_on_input, new_system_prompt=new_system_prompt)
        # Given the message transform as well, SFTTransform would refuse tool turns.
        transforms = [messages, SFTTransform(model_transform=tokenizer)]
    rows = Rows(table, row_format, files if split == "train" and len(files) > 1 else (), transforms)
    if not packed:
        return rows
    return PackedDataset(rows, max_seq_len=tokenizer.max_seq_len, split_across_pack=is_text)


def hold_out(table: datasets.Dataset, part: str, validation_fraction: float, split_seed: int) -> datasets.Dataset:
    """One of two parts of a table: ``train`` or ``validation``, which holds ``validation_fraction`` of the rows and at least one.

    Raises:
        UserError: a fraction out of range, or no row left to train on.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"dataset.validation_fraction={validation_fraction} must lie in (0, 1), such as 0.1")
    held_out = max(1, round(validation_fraction * len(table)))
    if held_out >= len(table):
        raise UserError(
            f"dataset: {len(table)} rows are too few to hold out {validation_fraction:g} of them; give more rows"
        )
    parts = table.train_test_split(test_size=held_out, seed=split_seed)
    return parts["train" if part == "train" else "test"]


def load_rows(
    source: str | None,
    data_files: str | list[str] | None,
    *,
    name: str | None,
    split: str,
    format: str,
    column_map: Mapping[str, str] | None,
) -> tuple[datasets.Dataset, RowFormat, list[Path]]:
    """A table, its format, and the local files it was read from; arguments as for ``rows_dataset``.

    Raises:
        UserError: see ``rows_dataset``.
    """
    names = None if data_files is None else [data_files] if isinstance(data_files, str) else list(map(str, data_files))
    is_local = names is not None and not any("://" in file for file in names)
    is_hub = source is not None and source not in SOURCES.values()
    if names is None and not is_hub:
        raise UserError(f"dataset.source={source} needs data_files, the path of the rows; set it")
    if is_hub or not is_local or names is None:
        source = source or source_of(map(Path, names or ()))
        table = datasets.load_dataset(source, name, split=split, data_files=names)
        return table, _format_of_table(table, format, column_map, source), []
    files = local_files(names)
    source = source or source_of(files)
    if format == AUTO:
        format = detect(names, source, column_map).format
    options: dict[str, Any] = {}
    if source == "csv":  # numbers stay text, and so do the words None and NA
        strings = datasets.Features({column: datasets.Value("string") for column in csv_columns(files[0])})
        options = {"features": strings, "keep_default_na": False, "na_values": [""]}
    try:
        table = datasets.load_dataset(source, data_files=[str(file) for file in files], split=split, **options)
    except datasets.exceptions.DatasetGenerationError as error:
        _check_same_fields(files, source)
        raise UserError(f"dataset: {error.__cause__ or error}") from error
    return table, _format_of_table(table, format, column_map, source), files


def _format_of_table(
    table: datasets.Dataset, format: str, column_map: Mapping[str, str] | None, source: str
) -> RowFormat:
    if len(table) == 0:
        raise UserError("dataset is empty: the split has no rows; give another file or split")
    found = detect_columns(table.column_names, table[0], format, column_map)
    return dataclasses.replace(found, source=source, num_rows=len(table))


@functools.cache
def _num_rows(file: Path, source: str) -> int:
    return sum(1 for _ in read_rows(file, source))


def _check_same_fields(files: list[Path], source: str) -> None:
    first: set[str] | None = None
    for file in files:
        for number, row in enumerate(read_rows(file, source), start=1):
            first = set(row) if first is None else first
            if set(row) != first:
                different = sorted(first ^ set(row))[0]
                problem = "lacks" if different in first else "has"
                raise UserError(
                    f"data_files={file}: row {number} {problem} the field {different!r}, unlike the rows before it, and the datasets library "
                    "cannot read them as one table; give all rows the same fields, or each file an entry in a list of datasets"
                )
