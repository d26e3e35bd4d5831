"""Rows in files, and datasets of them as the recipes load them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finch.data.dataset import Samples, load_dataset

ROWS = "finch.data.rows.rows_dataset"


def write_lines(file: Path, *rows: Any) -> str:
    """Writes each row as JSON, or as it is where it is text or bytes; returns the file's path."""
    texts = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
    file.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
    return str(file)


def dataset_config(data_files: str | list[str], **arguments: Any) -> Any:
    return OmegaConf.create({"dataset": {"_component_": ROWS, "source": "json", "data_files": data_files, **arguments}})


def load(tokenizer: Any, data_files: str | list[str], **arguments: Any) -> Samples:
    return load_dataset(dataset_config(data_files, **arguments), "dataset", tokenizer)


def openai(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def sharegpt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    roles = {"user": "human", "assistant": "gpt"}
    return [{"from": roles.get(role, role), "value": content} for role, content in turns]


def membership(prompts: Iterable[str]) -> str:
    """A hash of the prompts of a part, whatever their order."""
    return hashlib.sha256("\n".join(sorted(prompts)).encode()).hexdigest()[:16]
