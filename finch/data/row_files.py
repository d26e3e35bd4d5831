"""Local files of rows: which ones a path or pattern names, their rows one by one, and the split into training, validation and test rows.

The split depends on the rows' content and a seed, not on the order of the file. Rows are sorted by a keyed hash of their prompts, and the
sorted list is cut by counts: test rows first, then validation rows, then training rows. Everybody who has the same rows gets the same
parts, in the same order.
"""

from __future__ import annotations

import codecs
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import datasets

from finch.errors import UserError
from finch.log import logger

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
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern(name) else [name]
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
    """Whether a name stands for several files; one that is there is that file, whatever characters it has."""
    return any(sign in name for sign in "*?[") and not Path(name).exists()


def extension_of(name: str) -> str:
    """A path's extension in small letters, without .gz."""
    return Path(name.lower().removesuffix(".gz")).suffix


def source_of(files: Iterable[Path]) -> str:
    """The datasets library's reader for files, by their extensions. Raises UserError for an unknown extension, or several kinds of files."""
    sources = {}
    for file in files:
        source = SOURCES.get(extension_of(str(file)))
        if source is None:
            raise UserError(
                f"data_files={file} has an unknown extension; known are {', '.join(SOURCES)}: rename it, or name its kind: dataset.source=json"
            )
        sources[source] = file
    if len(sources) > 1:
        raise UserError(
            f"data_files: {' and '.join(map(str, sources.values()))} are of different kinds ({', '.join(sources)}); give each kind an entry "
            "in a list of datasets"
        )
    return next(iter(sources))


def read_rows(file: Path, source: str) -> Iterator[dict[str, Any]]:
    """The rows of one local file in its order: the values of the JSON, or the cells of the CSV, of which an empty one is None; no type is
    inferred. Raises UserError if the file cannot be read, or a row is not JSON."""
    try:
        if source in ("json", "csv"):
            with _open_bytes(file) as content:
                _check_encoding(content, file)
                yield from _read_json(content, file) if source == "json" else _read_csv(content, file)
        else:  # a name may have signs that the library takes for a pattern
            yield from datasets.load_dataset(source, data_files=glob.escape(str(file)), split="train")
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise _not_utf8(file, f"byte 0x{error.object[error.start]:02x}", "cp1252") from error
    except _UNREADABLE as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"data_files={file} cannot be read as {source} ({reason}); check the file") from error


def _check_encoding(content: IO[bytes], file: Path) -> None:
    start = content.read(4)
    content.seek(0)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        raise _not_utf8(file, "its first bytes are UTF-16's", "UTF-16")


def _not_utf8(file: Path, why: str, encoding: str) -> UserError:
    return UserError(
        f"data_files={file} is not UTF-8 ({why}), perhaps {encoding}; write it as UTF-8: iconv -f {encoding} -t UTF-8 OLD > NEW"
    )


def _read_csv(content: IO[bytes], file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a document
    lines = csv.reader(io.TextIOWrapper(content, encoding="utf-8-sig", newline=""))
    header = next(lines, [])
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UserError(f"data_files={file}: its header has the column {twice!r} twice; rename one of them")
    for number, cells in enumerate((cells for cells in lines if cells), start=1):
        if len(cells) > len(header):
            raise UserError(f"data_files={file}: row {number} has more fields than the header; fix or remove that row")
        # A column without a name is the index that pandas writes.
        yield {name: cell or None for name, cell in itertools.zip_longest(header, cells) if name}


def _read_json(content: IO[bytes], file: Path) -> Iterator[dict[str, Any]]:
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
        rows = json.loads(content.read().decode("utf-8-sig"), object_pairs_hook=_without_repetition)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"data_files={file} is not a JSON array ({error}); fix it") from error
    for number, row in enumerate(rows, start=1):
        _check_whole_characters(json.dumps(row), row, file, number)
        yield row


def _lines(content: IO[bytes], file: Path) -> Iterator[Any]:
    for number, line in enumerate(filter(bytes.strip, content), start=1):
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        try:
            row = json.loads(text, object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            raise UserError(f"data_files={file}: row {number} is not JSON ({error}); fix or remove that row") from error
        _check_whole_characters(text, row, file, number)
        yield row


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the field {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _check_whole_characters(text: str, row: Any, file: Path, number: int) -> None:
    """Half a surrogate pair, such as half an emoji, is no character of UTF-8; JSON can write it by an escape only."""
    if _SURROGATE.search(text) and (half := _SURROGATE_CHARACTER.search(json.dumps(row, ensure_ascii=False))):
        raise UserError(
            f"data_files={file}: row {number} has {half.group()!r}, half of a character that is written as two; fix or remove that row"
        )


_SURROGATE, _SURROGATE_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")


class JsonRows:
    """Rows of JSON or CSV files, each as JSON text in an arrow table, so that no value is cast to the type of another row's.

    What :class:`datasets.Dataset` has of the same name is the same here.

    Args:
        texts: with the one column ``row``.
    """

    def __init__(self, texts: datasets.Dataset) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [row.get(key) for row in self]
        return json.loads(self._texts[key]["row"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (json.loads(row["row"]) for row in self._texts)

    @functools.cached_property
    def column_names(self) -> list[str]:
        """Of all rows; not every row needs to have each."""
        return list(dict.fromkeys(name for row in self for name in row))

    @property
    def _indices(self) -> Any:
        return self._texts._indices

    @property
    def _fingerprint(self) -> str:
        return str(self._texts._fingerprint)

    def select(self, indices: Iterable[int]) -> JsonRows:
        return JsonRows(self._texts.select(indices))

    def train_test_split(self, **options: Any) -> dict[str, JsonRows]:
        return {name: JsonRows(part) for name, part in self._texts.train_test_split(**options).items()}


def json_rows(files: Sequence[Path], source: str, split: str) -> JsonRows:
    """The rows of JSON or CSV files, one after the other; the library keeps them in its cache, from where all processes map them.

    ``split``: ``train`` or a part of it, such as ``train[:400]``. Raises UserError as :func:`read_rows`, and for another split.
    """
    versions = [(str(file.absolute()), _content_digest(file), code_digest()) for file in files]
    features = datasets.Features({"row": datasets.Value("large_string")})
    try:
        texts = datasets.Dataset.from_generator(
            _texts, features=features, gen_kwargs={"versions": (tuple(versions),), "source": source}
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        if not isinstance(error.__cause__, OSError):
            raise
        texts = _in_memory(error.__cause__, versions, source, features)
    except OSError as error:
        texts = _in_memory(error, versions, source, features)
    if split != "train":
        try:
            [part] = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(texts)})
        except (ValueError, AssertionError) as error:
            raise UserError(
                f"dataset.split={split}: files have the split train and parts of it, such as train[:400]"
            ) from error
        texts = texts.select(range(part.from_ or 0, len(texts) if part.to is None else part.to))
    return JsonRows(texts)


@functools.cache
def code_digest() -> str:
    """Of the code that rows depend on, so that what an earlier version has kept is not taken."""
    package = Path(__file__).parents[1]
    files = sorted([*package.glob("data/*.py"), *package.glob("models/chat_*.py")])
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _content_digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def _in_memory(
    error: OSError, versions: Sequence[tuple[Any, ...]], source: str, features: datasets.Features
) -> datasets.Dataset:
    logger.warning(
        f"the cache of the datasets library, {datasets.config.HF_DATASETS_CACHE}, cannot be written ({error.strerror or error}); the rows are kept in "
        "memory; HF_DATASETS_CACHE names another folder"
    )
    return datasets.Dataset.from_dict({"row": [row["row"] for row in _texts((tuple(versions),), source)]}, features)


def _texts(versions: Sequence[Sequence[tuple[Any, ...]]], source: str) -> Iterator[dict[str, str]]:
    """``versions``: path and digest of each file, and the code's, which the library takes into its fingerprint."""
    for path, *_ in versions[0]:
        for row in read_rows(Path(path), source):
            yield {"row": json.dumps(row)}


def _open_bytes(file: Path) -> Any:
    return gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb")


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
