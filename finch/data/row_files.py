"""Local files of rows: which ones a path or pattern names, their rows one by one, and the split into training, validation and test rows.

The split depends on the rows' content and a seed, not on the order of the file. Rows are sorted by a keyed hash of their prompts, and the
sorted list is cut by counts: test rows first, then validation rows, then training rows. Everybody who has the same rows gets the same
parts, in the same order.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import datasets

from finch.errors import UserError

ALL = "all"
PARTS = (ALL, "train", "validation", "test")
_UNREADABLE = (OSError, EOFError, ValueError, csv.Error, datasets.exceptions.DatasetGenerationError)
"""What readers of broken files raise; pyarrow's errors are ValueErrors."""
SOURCES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def local_files(data_files: str | Iterable[str]) -> list[Path]:
    """The files that paths and patterns name. Raises UserError if one is missing, empty or a directory, or a pattern matches nothing."""
    names = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
    files: list[Path] = []
    for name in map(str, names):
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern(name) and not Path(name).exists() else [name]
        if not matches:
            raise UserError(f"data_files={name} matches no file; correct the pattern")
        files.extend(map(Path, matches))
    if not files:
        raise UserError("data_files names no file; give the path of the rows")
    for file in files:
        check_file(file, "data_files")
    return files


def check_file(file: Path, key: str) -> None:
    """Raises UserError if the file is missing, empty or a directory."""
    if file.is_dir():
        raise UserError(f"{key}={file} is a directory; name its files, such as {file}/*.jsonl")
    if not file.is_file():
        raise UserError(f"{key}={file} does not exist; correct the path")
    if file.stat().st_size == 0:
        raise UserError(f"{key.split('.')[0]} is empty: {file} has no rows; give another file")


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def extension_of(name: str) -> str:
    """A path's extension without .gz."""
    return Path(name.removesuffix(".gz")).suffix


def source_of(files: Iterable[Path]) -> str:
    """The datasets library's reader for files, by their extensions. Raises UserError for an unknown extension, or several kinds of files."""
    sources = {}
    for file in files:
        source = SOURCES.get(extension_of(str(file)))
        if source is None:
            raise UserError(
                f"data_files={file} has an unknown extension; known are {', '.join(SOURCES)}: rename it, or name its kind: source=json"
            )
        sources[source] = file
    if len(sources) > 1:
        raise UserError(
            f"data_files: {' and '.join(map(str, sources.values()))} are of different kinds ({', '.join(sources)}); give each kind an entry "
            "in a list of datasets"
        )
    return next(iter(sources))


def read_rows(file: Path, source: str) -> Iterator[dict[str, Any]]:
    """The rows of one local file in its order. Raises UserError if the file cannot be read, or a row is not JSON."""
    try:
        if source == "json":
            yield from _read_json(file)
        elif source == "csv":
            with _open(file) as text:
                for number, row in enumerate(csv.DictReader(text), start=1):
                    if None in row:
                        raise UserError(
                            f"data_files={file}: row {number} has more fields than the header; fix or remove that row"
                        )
                    yield row
        else:
            yield from datasets.load_dataset(source, data_files=str(file), split="train")
    except UserError:
        raise
    except _UNREADABLE as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"data_files={file} cannot be read as {source} ({reason}); check the file") from error


def csv_columns(file: Path) -> list[str]:
    """The header of a CSV file."""
    with _open(file) as text:
        return next(csv.reader(text), [])


def _read_json(file: Path) -> Iterator[dict[str, Any]]:
    with _open_bytes(file) as content:
        start = next((line.strip() for line in content if line.strip()), b"").removeprefix(codecs.BOM_UTF8)
        is_array = start.startswith(b"[")
        content.seek(0)
        for number, row in enumerate(_array(content, file) if is_array else _lines(content, file), start=1):
            if not isinstance(row, dict):
                raise UserError(
                    f"data_files={file}: row {number} is {'null, ' if row is None else ''}not a JSON object, it has no fields; fix or remove that row"
                )
            yield row


def _array(content: IO[bytes], file: Path) -> Iterator[Any]:
    try:
        yield from json.load(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data_files={file} is not a JSON array ({error}); fix it") from error


def _lines(content: IO[bytes], file: Path) -> Iterator[Any]:
    for number, line in enumerate(filter(bytes.strip, content), start=1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"data_files={file}: row {number} is not JSON ({error}); fix or remove that row") from error


def _open_bytes(file: Path) -> Any:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _open(file: Path) -> IO[str]:
    return io.TextIOWrapper(_open_bytes(file), encoding="utf-8-sig", errors="replace", newline="")


def part_indices(
    rows: Sequence[tuple[Any, Any]],
    part: str,
    *,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.25,
    seed: int = 0,
) -> list[int]:
    """The indices of one part's rows in the order of their hashes, which is the same for every order of ``rows``.

    Rows with equal prompts belong to the same part: a cut between them moves behind the last of them, so that the part before the
    cut has more rows than its fraction, and the next one fewer. Otherwise the sizes are the rounded fractions.

    Args:
        rows: of each row, its prompt and its remaining content as JSON values. Fields without a value count as absent.
        part: ``train``, ``validation`` or ``test``.
        validation_fraction, test_fraction: shares of all rows, in [0, 1); by default the paper's.
        seed: of the hash; another one gives other parts.

    Raises UserError if a fraction is out of range, or a part is empty.
    """
    check_fractions(part, validation_fraction, test_fraction)
    keys = [(_digest(prompt, seed), _digest(rest, seed)) for prompt, rest in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)

    def cut_after(count: int) -> int:
        while 0 < count < len(order) and keys[order[count - 1]][0] == keys[order[count]][0]:
            count += 1
        return count

    num_test, num_validation = round(test_fraction * len(rows)), round(validation_fraction * len(rows))
    test_end = cut_after(num_test)
    validation_end = max(test_end, cut_after(num_test + num_validation))
    parts = {
        "test": order[:test_end],
        "validation": order[test_end:validation_end],
        "train": order[validation_end:],
    }
    shares = {"test": test_fraction, "validation": validation_fraction, "train": 1.0}
    if empty := next((name for name, share in shares.items() if share > 0 and not parts[name]), None):
        raise UserError(
            f"dataset: of {len(rows)} rows none is left for part={empty} with validation_fraction={validation_fraction:g} and "
            f"test_fraction={test_fraction:g} (rows with equal prompts stay together); give more rows or another fraction"
        )
    return parts[part]


def check_fractions(part: str, validation_fraction: float, test_fraction: float) -> None:
    """Raises UserError if a fraction is out of range, or that of ``part`` is 0."""
    fractions = {"validation": validation_fraction, "test": test_fraction}
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"dataset.{name}_fraction={fraction} must lie in [0, 1), such as 0.05")
    if validation_fraction + test_fraction >= 1:
        raise UserError(
            f"dataset.validation_fraction={validation_fraction} and dataset.test_fraction={test_fraction} leave no rows to train on; their "
            "sum must be below 1"
        )
    if fractions.get(part) == 0:
        raise UserError(f"dataset.part={part} is empty with dataset.{part}_fraction=0; set it, such as 0.05")


def _digest(value: Any, seed: int) -> bytes:
    text = json.dumps(without_none(value), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("ascii"), key=str(seed).encode(), digest_size=16).digest()


def without_none(value: Any) -> Any:
    """The datasets library gives every row the fields that any row of the file has."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return value
