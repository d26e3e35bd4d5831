"""Files that are on the disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a new file and waits until the disk has it."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Gives a file new content in one step: a reader, and a kill, find the old or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    write_text(partial, text)
    partial.replace(path)
    sync_folder(path.parent)


def is_disk_error(error: BaseException | None) -> bool:
    """Whether torch's writer failed on a file: it is a RuntimeError that keeps nothing of what the disk said."""
    return isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "inline_container" in str(error))


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder: a file that is synced can still lose its name to a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
