"""Hashes that say whether a result belongs to a model: of its weights, its tokenizer, and of settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from finch.evaluation.model_folders import ModelFolder, weight_files
from finch.models.hf_config import CONFIG

SHORT = 12
"""Digits of a hash in a folder's name."""


def hash_weights(folder: ModelFolder) -> str:
    """SHA-256 of a model's weights and config; of an adapter, of its files and of the model that it changes.

    The names of the files do not count, so that a copy of the folder has the same hash.
    """
    digest = hashlib.sha256()
    folders = [folder] if folder.base is None else [ModelFolder(folder.option, folder.base), folder]
    for one in folders:
        for path in [*([] if one.is_adapter else [one.path / CONFIG]), *weight_files(one)]:
            digest.update(hash_file(path).encode())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_values(*values: Any) -> str:
    """SHA-256 of values that JSON can hold; the order of a mapping's keys does not count."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
