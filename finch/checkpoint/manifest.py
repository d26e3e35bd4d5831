"""manifest.json: the size and SHA-256 of every file of a checkpoint, so that a damaged one is known before it is read.

torch.distributed.checkpoint keeps its index as a pickle, which runs whatever it holds. A manifest guards against damage,
not against a stranger who may write into the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from finch import files

FILE_NAME = "manifest.json"


class CorruptCheckpoint(ValueError):
    """A checkpoint that is not as it was written; the message names the file."""


def digest_of(file: Path) -> dict[str, Any]:
    """An entry of the manifest: size in bytes and SHA-256 of one file."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def write(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the manifest, last of all: a folder without one is not whole."""
    files.write_text(folder / FILE_NAME, _text(entries))
    files.sync(folder)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries by file name, from a manifest that is byte for byte as it was written.

    Raises:
        CorruptCheckpoint: it is missing, or any byte of it has changed.
    """
    try:
        text = (folder / FILE_NAME).read_bytes().decode()
        entries = json.loads(text)["files"]
        whole = _text(entries) == text
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{FILE_NAME} cannot be read ({type(error).__name__})") from error
    if not whole:
        raise CorruptCheckpoint(f"{FILE_NAME} is not as it was written")
    return entries


def verify(folder: Path, names: Iterable[str], entries: Mapping[str, Mapping[str, Any]]) -> None:
    """
    Raises:
        CorruptCheckpoint: one of the files ``names`` is missing or differs from its entry.
    """
    for name in names:
        file = folder / name
        try:
            if file.stat().st_size != entries[name]["bytes"]:
                raise CorruptCheckpoint(f"{name} has {file.stat().st_size} bytes in place of {entries[name]['bytes']}")
            if digest_of(file) != entries[name]:
                raise CorruptCheckpoint(f"{name} is not as it was written")
        except OSError as error:
            raise CorruptCheckpoint(f"{name} cannot be read ({error.strerror})") from error


def _text(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The only spelling of these entries, with their own digest, so that a change of any byte shows."""
    own = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256_of_files": own}, indent=1, sort_keys=True) + "\n"
