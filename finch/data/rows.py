"""A dataset of any known row format, from local files or the hub, and the seeded part of it that is trained or validated on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform

from finch.base.errors import UserError
from finch.base.files import exists
from finch.base.log import logger
from finch.data.formats import (
    AUTO,
    FIELDS,
    TURN_KEYS,
    RowFormat,
    RowToMessages,
    detect_columns,
    format_of_table,
    unused_fields,
)
from finch.data.row_files import PARTS, SOURCES, is_url, local_files, part_indices, source_of
from finch.data.table import Table, read_table
from finch.data.token_cache import TokenizedRow, TokenizedRows, tokenized_rows
from finch.objectives import IGNORE_INDEX

SPLITS_BY, VALIDATION_FRACTION = ("order", "content"), 0.1
TARGETS = {"instruction": "output", "question_answer": "answer", "prompt_completion": "completion"}
"""The field of a format that is not the prompt; rows of other formats are compared completely."""


class Rows(Dataset[Any]):
    """Rows of a table, tokenized on access as ``{"tokens": [...], "labels": [...]}``.

    Args:
        table: with the columns that the transforms read.
        transforms: from a row to tokens and labels, one after the other.
        many: the last transform of many samples at once, to ids and masks or errors; None: each row is tokenized whenever it is read.
        tokenizer, settings: what the rows depend on next to table and format.
        learns_answers: whether an assistant's turns are the only targets.
    """

    def __init__(
        self,
        table: Table,
        row_format: RowFormat,
        transforms: Sequence[Callable[[Any], Any]],
        many: Callable[[Sequence[Any]], Sequence[Any]] | None,
        tokenizer: Any,
        settings: Sequence[Any],
        learns_answers: bool,
    ) -> None:
        self._data, self._transforms, self._many = table, transforms, many
        self.tokenizer, self._settings = tokenizer, settings
        self.row_format, self.learns_answers = row_format, learns_answers
        self.tokenized: TokenizedRows | None = None

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.tokenized is not None:
            return self.tokenized[index]
        sample: Any = self._data[index]
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def tokenize(self, title: str) -> None:
        """Tokenizes all rows at once, or maps those that an earlier call has kept, see :mod:`finch.data.token_cache`; nothing without a
        tokenizer for many rows."""
        if self._many is None or self.tokenized is not None:
            return
        format = [self.row_format.format, self.row_format.columns, self.row_format.source]
        content = [*self._data.key, *format, *self._settings, *self.tokenizer.fingerprint]
        self.tokenized = tokenized_rows(self._batches, len(self), content, title)

    def _batches(self, size: int) -> Iterator[list[TokenizedRow]]:
        rows = iter(self._data)
        while batch := list(itertools.islice(rows, size)):
            yield self._tokenize_batch(batch)

    def _tokenize_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[TokenizedRow]:
        *before, last = self._transforms
        samples = [_attempt(before, row) for row in rows]
        whole = [sample for sample in samples if not isinstance(sample, Exception)]
        assert self._many is not None
        found = _attempt([self._many], whole)
        if isinstance(found, Exception):  # one row can break it for all
            found = [_attempt([last], sample) for sample in whole]
        rest = iter(found)
        found = [sample if isinstance(sample, Exception) else next(rest) for sample in samples]
        return [self._tokenized_row(row, each) for row, each in zip(rows, found, strict=True)]

    def _tokenized_row(self, row: Mapping[str, Any], found: Any) -> TokenizedRow:
        is_converted = isinstance(self._transforms[0], functools.partial)  # the converter reads other fields
        unused = () if is_converted else unused_fields(row, self.row_format, self.tokenizer)
        notes = unused, self.has_empty_text(row)
        if isinstance(found, Exception):
            # The error is kept in place of the row, which is named with its number when it is read, on every start.
            return TokenizedRow((), (), reason_of(found), *notes)
        if isinstance(found, Mapping):
            return TokenizedRow(found["tokens"], found["labels"], None, *notes)
        tokens, mask = np.asarray(found[0], np.int64), np.frombuffer(bytes(found[1]), bool)
        return TokenizedRow(tokens, np.where(mask, IGNORE_INDEX, tokens), None, *notes)

    def is_empty(self, index: int) -> bool:
        """Whether a text or turn of a row is empty; see :meth:`has_empty_text`."""
        return self.has_empty_text(self._data[index]) if self.tokenized is None else self.tokenized.is_empty(index)

    def has_empty_text(self, row: Mapping[str, Any]) -> bool:
        """Whether a text or turn of a row is empty or spaces only; an instruction's input may be."""
        columns = self.row_format.columns
        values = [row.get(column) for field, column in columns.items() if field != "input"]
        turns = [turn for value in values if isinstance(value, list) for turn in value if isinstance(turn, dict)]
        texts = [*values, *(turn.get(key) for turn in turns for _, key in TURN_KEYS.values())]
        return any(isinstance(text, str) and not text.strip() for text in texts)

    def origin(self, index: int) -> tuple[str | None, int]:
        """A row's file and number; see :meth:`finch.data.table.Table.origin`."""
        return self._data.origin(index)


class TextToTokens:
    """Plain text between the tokenizer's BOS and EOS, every token a target, as in torchtune's TextCompletionDataset.

    Rows that are not truncated at the tokenizer's max_seq_len are split by packing.
    """

    def __init__(self, tokenizer: Any, column: str, *, is_truncated: bool = True) -> None:
        self.tokenizer, self._column = tokenizer, column
        self._limit = tokenizer.max_seq_len if is_truncated else None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self.tokenizer.encode(self._text(row), add_bos=True, add_eos=True)[: self._limit]
        return {"tokens": tokens, "labels": tokens.copy()}

    def many(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[bool]]]:
        """Ids and mask of each row."""
        found = self.tokenizer.encode_many([self._text(row) for row in rows])
        return [(ids[: self._limit], [False] * len(ids[: self._limit])) for ids in found]

    def _text(self, row: Mapping[str, Any]) -> str:
        text = row.get(self._column)
        if not isinstance(text, str):
            raise UserError(f"its field {self._column!r} is {'missing or null' if text is None else 'not text'}")
        return text


def _attempt(transforms: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    """The transformed value, or the error."""
    try:
        for transform in transforms:
            value = transform(value)
    except Exception as error:  # a row can break any library's transform or tokenizer
        return error
    return value


def reason_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


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
    validation_fraction: float = VALIDATION_FRACTION,
    test_fraction: float = 0.0,
    split_seed: int = 0,
    split_by: str = "order",
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> Rows | PackedDataset:
    """Rows of any format of ``finch.data.formats.FIELDS``. The parts of one seed never share a row.

    Args:
        source: a hub name, or ``json``, ``csv`` or ``parquet`` for ``data_files``; None: by the extension of ``data_files``.
        data_files: a local path, a pattern, or a list of them; with a hub name, files of that repository.
        name: the hub's configuration.
        split: the hub's or file's split, torchtune's ``train[:400]`` form included.
        format: ``auto``, or a key of ``finch.data.formats.FIELDS``.
        column_map: from the format's fields to columns of other names.
        part: ``all`` rows in the file's order, ``train``, ``validation``, or ``test``, which needs ``split_by=content``.
        validation_fraction: share of the rows held out, in (0, 1).
        test_fraction: share of the rows in the test part, in [0, 1).
        split_seed: of the permutation or hash that chooses them.
        split_by: ``content``: a part has the same rows whatever the file's order, and rows with equal prompts stay together (see
            ``finch.data.row_files``); ``order``: a permutation of the row numbers.
        train_on_input: whether all turns are targets, instead of only the assistant's.
        new_system_prompt: a system turn before each conversation, instead of the one it has.
        packed: whether rows are packed to ``tokenizer.max_seq_len``. Plain text is then split across packs, never truncated.

    Raises UserError for rows that cannot be read, of no known format or of another one than ``format``, and an argument out of range.
    """
    if split_by not in SPLITS_BY:
        raise UserError(f"dataset.split_by={split_by} must be {' or '.join(SPLITS_BY)}")
    is_by_content = split_by == "content"
    if not is_by_content and test_fraction:
        raise UserError(f"dataset.test_fraction={test_fraction} needs dataset.split_by=content; set it")
    check_part(part, PARTS if test_fraction else PARTS[:-1])
    check_packing(tokenizer, packed)
    if part == "all" and (split_seed != 0 or validation_fraction != VALIDATION_FRACTION):
        logger.warning(
            f"dataset.part=all holds nothing out: dataset.validation_fraction={validation_fraction} and split_seed={split_seed} change nothing; part=train "
            "does, with part=validation in dataset_validation"
        )
    if source is None and data_files is None:
        raise UserError("dataset needs data_files, the path of the rows, or source, a name on the hub; set one")
    files, reader = files_and_source(source, data_files)
    table = load_table(reader, data_files, files, name=name, split=split)
    if len(table) == 0:
        raise UserError("dataset is empty: the split has no rows; give another file or split")
    # Local files are read to the end, and the result is kept; of the hub's rows the first one has to do.
    if files and format == AUTO:
        row_format = format_of_table(table, reader, column_map)
    else:
        row_format = detect_columns(table.column_names, table[0], format, column_map)
    if part != "all" and is_by_content:
        indices = part_indices(
            contents(table, row_format),
            part,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=split_seed,
        )
        table = table.select(indices)
    elif part != "all":
        table = train_validation_split(table, part, validation_fraction, split_seed)
    return tokenized(
        tokenizer,
        table,
        dataclasses.replace(row_format, source=reader),
        train_on_input=train_on_input,
        new_system_prompt=new_system_prompt,
        packed=packed,
    )


def check_part(part: str, parts: Sequence[str]) -> None:
    """Raises UserError if ``part`` is none of ``parts``."""
    if part not in parts:
        raise UserError(f"dataset.part={part} must be {', '.join(parts[:-1])} or {parts[-1]}")


def check_packing(tokenizer: Any, packed: bool) -> None:
    """Raises UserError for packing without max_seq_len."""
    if packed and tokenizer.max_seq_len is None:
        raise UserError("dataset.packed=True needs tokenizer.max_seq_len, the length of a pack; set it")


def contents(table: Table, row_format: RowFormat) -> list[tuple[Any, Any]]:
    """Each row's prompt and target, for ``part_indices``; an optional field that is missing is the empty text."""
    target = TARGETS.get(row_format.format)

    def values(fields: Iterable[str]) -> Iterable[tuple[Any, ...]]:
        columns = [row_format.columns.get(field) for field in fields]
        return zip(*(table[column] if column else [""] * len(table) for column in columns), strict=True)

    prompts = values(field for field in FIELDS[row_format.format] if field != target)
    targets = values([target]) if target else [()] * len(table)
    return [([value or "" for value in prompt], list(rest)) for prompt, rest in zip(prompts, targets, strict=True)]


def tokenized(
    tokenizer: Any,
    table: Table,
    row_format: RowFormat,
    *,
    convert: functools.partial[Any] | None = None,
    train_on_input: bool,
    new_system_prompt: str | None,
    packed: bool,
) -> Rows | PackedDataset:
    """A table as a dataset of tokens and labels; arguments as for ``Rows`` and ``rows_dataset``.

    ``convert`` makes a row of the table one of ``row_format``. Raises UserError for a row that packing cannot use.
    """
    is_text = row_format.format == "text"
    if is_text and new_system_prompt is not None:
        raise UserError("dataset.new_system_prompt needs conversations, and the rows are plain text; leave it out")
    transforms: list[Callable[[Any], Any]] = [] if convert is None else [convert]
    if is_text:
        last = TextToTokens(tokenizer, row_format.columns["text"], is_truncated=not packed)
        transforms, many = [last], last.many if hasattr(tokenizer, "encode_many") else None
    else:
        many = getattr(tokenizer, "tokenize_many", None)
        messages = RowToMessages(
            row_format, train_on_input=train_on_input, new_system_prompt=new_system_prompt, tokenizer=tokenizer
        )
        # Given the message transform as well, SFTTransform would refuse tool turns.
        transforms += [messages, SFTTransform(model_transform=tokenizer)]
    settings = [train_on_input, new_system_prompt, is_text and not packed, *(convert.args if convert else ())]
    rows = Rows(table, row_format, transforms, many, tokenizer, settings, not (is_text or train_on_input))
    if not packed:
        return rows
    # On all cores; PackedDataset would read the rows one by one.
    rows.tokenize("dataset")
    return PackedDataset(rows, max_seq_len=tokenizer.max_seq_len, split_across_pack=is_text)


def train_validation_split(table: Table, part: str, validation_fraction: float, split_seed: int) -> Table:
    """One of two parts of a table, in its order: ``train`` or ``validation``, which holds ``validation_fraction`` of the rows and at least one; those
    of ``datasets.Dataset.train_test_split``. Raises UserError for a fraction out of range, or no row left to train on."""
    if not 0 < validation_fraction < 1:
        raise UserError(f"dataset.validation_fraction={validation_fraction} must lie in (0, 1), such as 0.1")
    held_out = max(1, round(validation_fraction * len(table)))
    if held_out >= len(table):
        raise UserError(f"dataset: {len(table)} rows are too few to hold out {validation_fraction:g} of them; add rows")
    order = np.random.default_rng(split_seed).permutation(len(table))
    return table.select(np.sort(order[held_out:] if part == "train" else order[:held_out]))


def files_and_source(source: str | None, data_files: str | list[str] | None) -> tuple[list[Path], str]:
    """The local files of rows, none of them for rows of the hub or of URLs; and the reader or the hub's name. Raises UserError if no files
    are named, or they cannot be read."""
    names = None if data_files is None else [data_files] if isinstance(data_files, str) else list(map(str, data_files))
    is_local = names is not None and not any(map(is_url, names))
    is_hub = source is not None and source not in SOURCES.values()
    if names is None and not is_hub:
        raise UserError(f"dataset.source={source} needs data_files, the path of the rows; set it")
    if is_hub or not is_local or names is None:
        return [], source or source_of(map(Path, names or ()))
    files = local_files(names)
    return files, source or source_of(files)


def load_table(
    source: str, data_files: str | list[str] | None, files: list[Path], *, name: str | None, split: str
) -> Table:
    """The rows of local ``files`` where there are some, otherwise of the hub or of URLs. Raises UserError if they cannot be read."""
    if files:
        return read_table(files, source, split)
    names = data_files if data_files is None or isinstance(data_files, str) else list(map(str, data_files))
    return Table([load_from_hub(source, name, split=split, data_files=names)])


def load_from_hub(source: str, name: str | None, **options: Any) -> Any:
    """As ``datasets.load_dataset``; ``source`` may be OWNER/NAME@REVISION. Raises UserError if the rows cannot be read."""
    source, _, revision = (source, "", "") if exists(source) else source.partition("@")
    options |= {"revision": revision} if revision else {}
    try:
        found = datasets.load_dataset(source, name, **options)
    except PermissionError as error:
        cache = datasets.config.HF_DATASETS_CACHE
        raise UserError(
            f"dataset: the cache {cache} cannot be written ({error}); set HF_DATASETS_CACHE to another folder"
        ) from error
    except (datasets.exceptions.DatasetGenerationError, ConnectionError, FileNotFoundError) as error:
        raise UserError(f"dataset: {' '.join(str(error.__cause__ or error).split())[:200]}") from error
    # Where the hub fails, the library takes what it has of another commit.
    parts = found.values() if isinstance(found, dict) else [found]
    if len(revision) == 40 and any(part.cache_files and revision not in str(part.cache_files) for part in parts):
        raise UserError(f"dataset.source={source}@{revision}: the cache has another commit, the hub fails; try later")
    return found
