"""Arrow files that are made once, under the datasets library's cache, by what they are made of; shared by all processes of a machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import xxhash
from filelock import FileLock, Timeout

from finch.base.log import logger
from finch.distributed import watchdog

POLL_S = 2.0
_PACKAGES = ("finch-finetune", "tokenizers", "torchtune", "transformers")


def cached(key: Any, batches: Callable[[], Iterable[pyarrow.RecordBatch]], title: str) -> pyarrow.Table:
    """The table of ``batches()``, at least one, memory-mapped from the file that the first process has written for this ``key``.

    The ``repr`` of ``key`` has all that the table depends on, except finch's code. A damaged file is written again. Where the cache cannot be
    written, a warning says so, and the table is in memory.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE, "finch")
    name = xxhash.xxh3_128_hexdigest(repr((_code(), key)).encode(errors="surrogatepass"))
    try:
        table = _find(folder, name)
        if table is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder / f"{name}.lock", title):
                # Another process may have written it while this one waited for the lock.
                if (table := _find(folder, name)) is None:
                    _write(folder, name, batches())
                    table = _find(folder, name)
        if table is None:
            raise OSError("what was written cannot be read")
        return table
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        _warn(folder, getattr(error, "strerror", None) or str(error))
        return pyarrow.Table.from_batches(batches())


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    logger.warning(
        f"rows cannot be kept in {folder} ({reason}); they are kept in memory, and made again at each start; HF_DATASETS_CACHE names another folder"
    )


def remembered(key: Any, make: Callable[[], Any], title: str) -> Any:
    """A JSON value that is made once."""
    return json.loads(cached(key, lambda: [pyarrow.record_batch({"value": [json.dumps(make())]})], title)[0][0].as_py())


@functools.lru_cache(maxsize=1000)
def _content_hash(file: Path, size: int, mtime: int) -> str:
    # Size and time are only the key of this cache: a file that has been written again is read again.
    return _hash(file)


def content_hash(file: Path) -> tuple[int, str]:
    """A file's size and the hash of its content."""
    stat = file.stat()
    return stat.st_size, _content_hash(file, stat.st_size, stat.st_mtime_ns)


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while part := content.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


@functools.cache
def _code() -> list[Any]:
    """What makes the rows: the versions of packages, and finch's own code, which changes between versions too."""
    root = Path(__file__).parents[1]
    files = sorted(file for part in ("data", "models") for file in (root / part).glob("*.py"))
    versions: list[Any] = []
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((name, importlib.metadata.version(name)))
    return [*versions, *((file.name, _hash(file)) for file in files)]


@contextlib.contextmanager
def _alone(file: Path, title: str) -> Iterator[None]:
    """Holds a lock; a process that waits for it says so, and that it lives."""
    lock = FileLock(file)
    for attempt in itertools.count():
        with contextlib.suppress(Timeout):
            lock.acquire(POLL_S)
            break
        watchdog.heartbeat()
        if attempt == 0:
            logger.info(f"{title}: waits for another process, which makes the same rows")
    try:
        yield
    finally:
        lock.release()


def _find(folder: Path, name: str) -> pyarrow.Table | None:
    for file in folder.glob(f"{name}-*.arrow"):
        # The name has the hash of the content: a file that a disk or a copy has damaged is not trusted.
        if file.is_file() and _hash(file) == file.stem.rpartition("-")[2]:
            return pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
        file.unlink()  # damaged, or no file
    return None


def _write(folder: Path, name: str, batches: Iterable[pyarrow.RecordBatch]) -> None:
    # No process number in the name: the lock is held, and what a killed one has left is removed here.
    partial = folder / f"{name}.partial"
    partial.unlink(missing_ok=True)
    try:
        rest = iter(batches)
        first = next(rest)
        # Not the file format, which refuses a column whose batches have dictionaries of their own (pandas' categories).
        with pyarrow.OSFile(str(partial), "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
            writer.write_batch(first)
            for batch in rest:
                writer.write_batch(batch)
        partial.rename(folder / f"{name}-{_hash(partial)}.arrow")
    finally:
        partial.unlink(missing_ok=True)
