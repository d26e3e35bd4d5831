"""Local files of rows: which ones a path or pattern names, their rows one by one, and the split into training, validation and test rows.

The split depends on the rows' content and a seed, not on the order of the file. Rows are sorted by a keyed hash of their prompts, and the
sorted list is cut by counts: test rows first, then validation rows, then training rows. Everybody who has the same rows gets the same
parts, in the same order.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, AnyStr

from omegaconf import DictConfig, ListConfig

from finch.base.errors import UserError
from finch.base.files import exists
from finch.config.instantiate import component_of
from finch.config.validation import without_weight

if TYPE_CHECKING:
    import pyarrow

ALL = "all"
PARTS = (ALL, "train", "validation", "test")
_UNREADABLE = (OSError, EOFError, ValueError, csv.Error)
"""What readers of broken files raise; pyarrow's errors are ValueErrors."""
SOURCES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
MAX_ROW, MAX_ARRAY = 1 << 26, 1 << 31
"""Bytes of a row, and of a JSON array, which is read as a whole: a small compressed file may hold more than any memory."""


def local_files(data_files: str | Iterable[str]) -> list[Path]:
    """The files that paths and patterns name. Raises UserError if one is missing, empty, a directory or named twice, or a pattern matches nothing."""
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
    if twice := [file for file, number in Counter(map(Path.resolve, files)).items() if number > 1]:
        raise UserError(f"data_files names {twice[0]} more than once, whose rows would count as often; name it once")
    return files


def check_file(file: Path, key: str) -> None:
    """Raises UserError if the file is missing, empty or a directory."""
    if file.is_dir():
        raise UserError(f"{key}={file} is a directory; name its files, such as {file}/*.jsonl")
    if not file.is_file():
        raise UserError(f"{key}={file} does not exist; correct the path")
    if file.stat().st_size == 0:
        raise UserError(f"{key.split('.')[0]} is empty: {file} has no rows; give another file")


def file_errors(cfg: DictConfig) -> Iterator[tuple[str, UserError]]:
    """What is wrong with the files of all rows, a probe's included, before any row is read, with its block's key: missing, empty, a directory."""
    sets = {"dataset": cfg.dataset, **dict(validation_sets(cfg.dataset_validation).values())}
    blocks = [(key, each) for key, node in sets.items() for each in nodes_of(node)]
    for key, node in [*blocks, *((f"probes.{name}", node) for name, node in (cfg.get("probes") or {}).items())]:
        try:
            check_arguments(node, key)
        except UserError as error:
            yield key, error


def validation_sets(node: Any) -> dict[str, tuple[str, Any]]:
    """From the name of each set's loss in the metrics, ``validation_loss`` of one set and ``validation/NAME/loss`` of named ones, to its config
    key and its block, in the config's order."""
    if node is None:
        return {}
    if component_of(node) is not None or not isinstance(node, DictConfig):
        return {"validation_loss": ("dataset_validation", node)}
    return {f"validation/{name}/loss": (f"dataset_validation.{name}", node[name]) for name in map(str, node)}


def nodes_of(node: Any) -> list[Any]:
    """The components of a block: one, or a list of them."""
    return [without_weight(entry) for entry in node] if component_of(node) is None else [node]


def check_arguments(node: Any, key: str) -> None:
    """Checks of a component what is known before rows are read. Raises UserError for a file that is missing, empty or a directory, one that is
    given as source, and streaming."""
    if node.get("streaming"):
        raise UserError(
            f"{key}.streaming=True is not supported: the order of an epoch is one seeded permutation of all rows, which needs their number; "
            "remove streaming"
        )
    file = str(node.get("source") or "")
    reader = SOURCES.get(extension_of(file))
    if reader is not None and node.get("data_files") is None and (Path(file).is_file() or not Path(file).exists()):
        raise UserError(f"{key}.source={file} is a file; set {key}.source={reader} {key}.data_files={file}")
    for path in _local_files(node):
        check_file(path, f"{key}.data_files")


def _local_files(node: Any) -> list[Path]:
    """The data files of a component that are paths, not patterns or URLs."""
    if node.get("source") not in (None, *SOURCES.values(), "text"):
        return []  # files of a repository on the hub
    files = node.get("data_files")
    names = [files] if isinstance(files, str) else list(files) if isinstance(files, (list, ListConfig)) else []
    return [Path(name) for name in map(str, names) if not is_pattern(name) and not is_url(name)]


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern; a path that exists is none, whatever characters it has."""
    return any(sign in name for sign in "*?[") and not exists(name)


def is_url(name: str) -> bool:
    return "://" in name and not exists(name)


def extension_of(name: str) -> str:
    """A path's extension without .gz, in small letters."""
    return Path(name.lower().removesuffix(".gz")).suffix


def source_of(files: Iterable[Path]) -> str:
    """The reader for files, by their extensions. Raises UserError for an unknown extension, or several kinds of files."""
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
    """The rows of one local file in its order. Raises UserError if the file cannot be read, or a row is not JSON."""
    if source in ("json", "csv"):
        return map(json.loads, read_texts(file, source))
    return (row for batch in read_batches(file, source) for row in batch.to_pylist())


def read_texts(file: Path, source: str) -> Iterator[str]:
    """The rows of a JSON or CSV file, each as the text of a JSON object. Raises UserError as :func:`read_rows`."""
    with _named(file, source), _open(file) as content:
        encoding = json.detect_encoding(content.read(4))
        if encoding not in ("utf-8", "utf-8-sig"):
            name = encoding.upper().replace("-BE", "BE").replace("-LE", "LE")  # as iconv has them
            raise _not_utf8(file, f"its first bytes are {name}'s", name)
        content.seek(3 if encoding == "utf-8-sig" else 0)
        yield from (_read_csv if source == "csv" else _read_json)(content, file)


def read_batches(file: Path, source: str) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a parquet or arrow file with the file's own columns; an empty batch first. Raises UserError if it cannot be read."""
    import pyarrow  # here: files are looked for before it has its time
    from pyarrow import parquet

    with _named(file, source), pyarrow.memory_map(str(file)) as content:
        if source == "parquet":
            table = parquet.ParquetFile(content)
            schema, batches = table.schema_arrow, table.iter_batches(1000)
        # Arrow has two formats under one extension; the datasets library writes the stream, without these bytes.
        elif content.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(content)
            schema, batches = reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            content.seek(0)
            batches = pyarrow.ipc.open_stream(content)
            schema = batches.schema
        if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
            raise UserError(f"data_files={file} has the column {twice!r} twice; rename one of them")
        # The cache takes the schema from the first batch, which a file without rows does not have.
        yield pyarrow.RecordBatch.from_pylist([], schema)
        before = 0
        for batch in batches:
            # Rows are measured one by one only in a batch that may have such a row.
            rows = range(batch.num_rows if batch.nbytes > MAX_ROW else 0)
            if (large := next((row for row in rows if batch.slice(row, 1).nbytes > MAX_ROW), None)) is not None:
                raise _too_large(file, before + large + 1)
            before += batch.num_rows
            yield batch


@contextlib.contextmanager
def _named(file: Path, source: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except _UNREADABLE as error:
        raise UserError(
            f"data_files={file} cannot be read as {source} ({' '.join(str(error).split())[:200]}); check the file"
        ) from error


def _open(file: Path) -> Any:
    return gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb")


def _lines_of(content: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a file; one that is too large is cut off at ``MAX_ROW``."""
    return itertools.takewhile(bool, iter(functools.partial(content.readline, MAX_ROW), None))


def _too_large(file: Path, number: int) -> UserError:
    return UserError(f"data_files={file}: row {number} has {MAX_ROW >> 20} MiB or more; split or remove that row")


def _not_utf8(file: Path, why: str, encoding: str, place: str = "") -> UserError:
    return UserError(
        f"data_files={file}{place} is not UTF-8 ({why}), perhaps {encoding}; write it as UTF-8: iconv -f {encoding} -t UTF-8 OLD > NEW"
    )


def utf8(content: bytes, file: Path, place: str = "") -> str:
    """The text of a file's bytes. Raises UserError that names what they may be in place of UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(file, f"byte 0x{content[error.start]:02x}", "cp1252", place) from error


def describe_faults(faults: Mapping[str, Sequence[int]]) -> str:
    """What is wrong with rows of a file, such as ``is not JSON``, each with its rows, of which ten are named."""
    texts = []
    for fault, rows in faults.items():
        names = ", ".join(map(str, rows[:10])) + (f", ... ({len(rows):,})" if len(rows) > 10 else "")
        texts.append(f"{'row' if len(rows) == 1 else 'each of the rows'} {names} {fault}")
    return ", ".join(texts)


def _check_faults(faults: Mapping[str, Sequence[int]], file: Path) -> None:
    if faults:
        them = "that row" if sum(map(len, faults.values())) == 1 else "them"
        raise UserError(f"data_files={file}: {describe_faults(faults)}; fix or remove {them}")


def _read_csv(content: IO[bytes], file: Path) -> Iterator[str]:
    # The module refuses fields above 128 KiB; rows have a limit of their own here.
    csv.field_size_limit(sys.maxsize)
    number = size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        # Bytes that are not UTF-8 pass for now, so that their row has a number; newlines in a field stay as they are.
        for line in _lines_of(io.TextIOWrapper(content, encoding="utf-8", errors="surrogateescape", newline="")):
            size += len(line)
            # Over all lines: a quotation mark that is not closed makes the rest of the file one row.
            if size >= MAX_ROW:
                raise _too_large(file, number + 1)
            yield line

    # Else a quotation mark that is escaped by a backslash would end its field, and be lost.
    rows = (cells for cells in csv.reader(lines(), strict=True) if cells)
    header, faults = next(rows, []), defaultdict[str, list[int]](list)
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise UserError(f"data_files={file}: its header has the column {twice!r} twice; rename one of them")
    try:
        for number, cells in enumerate(rows, start=1):
            size = 0
            if len(cells) > len(header):
                faults["has more fields than the header"].append(number)
            if faults:
                continue
            # A column without a name is the index that pandas writes.
            row = {name: cell or None for name, cell in itertools.zip_longest(header, cells) if name}
            text = json.dumps(row, ensure_ascii=False)
            utf8(text.encode(errors="surrogateescape"), file, f": row {number}")
            yield text
    except csv.Error as error:
        is_end = "end of data" in str(error)
        what = "is not closed" if is_end else "ends within its field; one that belongs to the text is written twice"
        faults[f"opens a quotation mark that {what}"].append(number + 1)
    _check_faults(faults, file)


def _read_json(content: IO[bytes], file: Path) -> Iterator[str]:
    start = content.tell()
    is_array = next((line.strip() for line in _lines_of(content) if line.strip()), b"").startswith(b"[")
    content.seek(start)
    faults: dict[str, list[int]] = defaultdict(list)
    for number, found in enumerate(_array(content, file) if is_array else _lines(content, file), start=1):
        if fault := found if isinstance(found, str) else _fault(*found):
            faults[fault].append(number)
        elif not faults:
            yield found[0]
    _check_faults(faults, file)


def _array(content: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    # Part by part, since a compressed file does not say how large it is.
    parts = iter(functools.partial(content.read, 1 << 20), b"")
    text = utf8(b"".join(itertools.islice(parts, MAX_ARRAY >> 20)), file, "")
    if content.read(1):
        raise UserError(f"data_files={file} is a JSON array of more than {MAX_ARRAY >> 30} GiB; write it as .jsonl")
    try:
        # Python's parser would keep the last of two equal keys without a word.
        rows = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data_files={file} is not a JSON array ({error}); fix it") from error
    for row in rows:
        yield json.dumps(row), row


def _lines(content: IO[bytes], file: Path) -> Iterator[tuple[str, Any] | str]:
    """Of each line its text and its row, or why it is none."""
    for number, line in enumerate(filter(bytes.strip, _lines_of(content)), start=1):
        if len(line) == MAX_ROW:
            raise _too_large(file, number)
        text = utf8(line.strip(), file, f": row {number}")
        try:
            row = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            yield f"is not JSON ({getattr(error, 'msg', error)})"
        else:
            yield text, row


def _fault(text: str, row: Any) -> str | None:
    """What is wrong with a row: it is no object, or has half of a surrogate pair, such as half an emoji; JSON can write one by an escape only."""
    if not isinstance(row, dict):
        return f"is {'null, ' if row is None else ''}not a JSON object, it has no fields"
    if _SURROGATE.search(text) and (half := _SURROGATE_CHARACTER.search(json.dumps(row, ensure_ascii=False))):
        return f"has {half.group()!r}, half of a character that is written as two"
    return None


_SURROGATE, _SURROGATE_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the field {next(name for name in names if names.count(name) > 1)!r} twice")
    return row


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
    parts = {"test": order[:test_end], "validation": order[test_end:validation_end], "train": order[validation_end:]}
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
    # Neither the order of fields nor nulls that a reader has added are content, which alone decides the part.
    text = json.dumps(without_none(value), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("ascii"), key=str(seed).encode(), digest_size=16).digest()


def without_none(value: Any) -> Any:
    """A value without null fields: the datasets library gives every row the fields that any row of the file has."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return value
