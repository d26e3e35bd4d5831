"""Size and SHA-256 of every file of a checkpoint or an exported model, so that damage is detected before a file is used.

torch.distributed.checkpoint keeps its index as a pickle, which runs whatever it contains. A manifest protects against damage,
not against an attacker who can write into the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from finch.base import files

FILE_NAME = "manifest.json"
EXPORTS = "finch_manifest.json"
"""The manifest's name next to a model's files."""


class CorruptCheckpoint(ValueError):
    """A file of a checkpoint is missing or was changed; the message names it."""


def file_entry(file: Path) -> dict[str, Any]:
    """The manifest's entry of one file: size in bytes and SHA-256."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def write(folder: Path, entries: Mapping[str, Mapping[str, Any]], name: str = FILE_NAME) -> None:
    """Writes the manifest of ``folder``; called last, since a folder without one is incomplete."""
    files.write_text(folder / name, _to_text(entries))
    files.sync(folder)


def read(folder: Path, name: str = FILE_NAME) -> dict[str, dict[str, Any]]:
    """The entries by file name. Raises CorruptCheckpoint if the manifest is missing, or a byte of it has changed."""
    try:
        text = files.read_bytes(folder / name).decode()
        entries = json.loads(text)["files"]
        # A name with a folder in it would have files outside of the checkpoint taken for its own.
        is_plain = all(Path(file).name == file and set(entry) == {"bytes", "sha256"} for file, entry in entries.items())
        is_unchanged = is_plain and _to_text(entries) == text
    # A damaged manifest can be any JSON: of another type, without a key, or nested deeper than the parser goes.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name} cannot be read ({type(error).__name__})") from error
    if not is_unchanged:
        raise CorruptCheckpoint(f"{name} is not as it was written")
    return entries


def verify(
    folder: Path, names: Iterable[str], entries: Mapping[str, Mapping[str, Any]], *, by_digest: bool = True
) -> None:
    """Raises CorruptCheckpoint if one of the files ``names`` is missing or differs from its entry: in its size, and ``by_digest`` in its content."""
    for name in names:
        file = folder / name
        try:
            # The size costs nothing, and shows a file that was cut off before gigabytes are hashed.
            if file.stat().st_size != entries[name]["bytes"]:
                raise CorruptCheckpoint(f"{name} has {file.stat().st_size} bytes instead of {entries[name]['bytes']}")
            if by_digest and file_entry(file) != entries[name]:
                raise CorruptCheckpoint(f"{name} is not as it was written")
        except OSError as error:
            raise CorruptCheckpoint(f"{name} cannot be read ({error.strerror})") from error


def _to_text(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The manifest's only valid text for these entries, with their own digest, so that a change of any byte shows."""
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256_of_files": digest}, indent=1, sort_keys=True) + "\n"
