"""Files and folders that are written completely or not at all: written next to their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Suffix of what is still being written; a reader never takes it for the finished file."""


@contextlib.contextmanager
def atomic_file(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yields the path to write to; on success it takes the place of ``path``. After an error ``path`` is as it was. ``is_shared``: other processes
    may write it at the same time."""
    partial = path.with_name(f"{path.name}{f'.{socket.gethostname()}.{os.getpid()}' if is_shared else ''}{PARTIAL}")
    remove(partial)
    try:
        # Reading the umask means setting it, for all threads of the process: a new file shows it instead.
        partial.touch()
        mode = partial.stat().st_mode
        partial.unlink()
        yield partial
        # Of a link, chmod and fsync would reach the target.
        if not partial.is_symlink():
            _finish(partial, mode)
        partial.replace(path)
        sync(path.parent)
    except BaseException:
        remove(partial)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; on success it takes the place of ``path``, once all that is in it is on the disk. After an error ``path``
    is as it was, and what was written is removed: on a full disk it takes the space that is missing."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        remove(partial)
        partial.mkdir(parents=True)
        yield partial
        # A folder made by mkdir shows the umask; its x bits are for folders only, and would make files executable.
        mode = partial.stat().st_mode
        for each in (*partial.rglob("*"), partial):
            if not each.is_symlink():
                _finish(each, mode if each.is_dir() else mode & 0o666)
        replace_folder(partial, path)
    except BaseException:
        remove(partial)
        raise


def replace_folder(new: Path, path: Path) -> None:
    """Gives a folder the name ``path``. One that has the name is renamed first, and removed at the end: half of it never has the name."""
    old = path.with_name(f"{path.name}.old{PARTIAL}")
    remove(old)
    # lexists, since a link whose target is gone has the name as well, and a folder cannot be renamed over it.
    if os.path.lexists(path):
        path.rename(old)
    new.rename(path)
    # Synced before the old folder goes, so that a power cut leaves one of the two.
    sync(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it, where it is there; what is left of a folder then does not matter."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError for what is no file: a pipe would keep its reader waiting."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        # Asked of the open file: what has the path may change between a check and the opening.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read."""
    try:
        found = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _finish(path: Path, mode: int) -> None:
    """Syncs a file or folder, with the permissions that the umask gives: safetensors' writer lets its owner alone read a file."""
    if stat.S_IMODE(path.stat().st_mode) != stat.S_IMODE(mode):
        path.chmod(stat.S_IMODE(mode))
    sync(path)


def exists(name: str) -> bool:
    """Whether something has this path; a name that no system takes is none."""
    with contextlib.suppress(OSError, ValueError):
        return Path(name).exists()
    return False


def write_text(path: Path, text: str) -> None:
    """Writes a new file and waits until it is on the disk."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str, *, is_shared: bool = False) -> None:
    """Writes a file completely or not at all; see :func:`atomic_file`."""
    with atomic_file(path, is_shared=is_shared) as partial:
        write_text(partial, text)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it that are missing, and waits until their names are on the disk."""
    existing = existing_part(path)
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.absolute().parents:
        if parent.is_relative_to(existing):
            with contextlib.suppress(PermissionError):  # to list it, which syncing needs
                sync(parent)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk: a synced file can still lose its name to a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_part(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there: where free disk and permissions can be asked for."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def is_disk_error(error: BaseException | None) -> bool:
    """Whether torch's writer failed on a file: it raises a RuntimeError that keeps nothing of the system's message."""
    return isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "inline_container" in str(error))


def gigabytes(number: int) -> str:
    """A size in bytes, for people."""
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number / 1000:,.1f} kB"
