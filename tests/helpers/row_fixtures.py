"""The base model's tokenizer, and rows in files of the test's folder."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from torchtune.config import instantiate

from helpers import rows as rows_helper
from helpers.rows import write_lines
from helpers.runs import make_config


@pytest.fixture
def config(base_folder, rows_file, tmp_path):
    return OmegaConf.create(make_config(base_folder, rows_file, tmp_path / "run"))


@pytest.fixture
def tokenizer(config):
    return instantiate(config.tokenizer)


@pytest.fixture
def write(tmp_path):
    """Writes rows, or lines of text, into a file of this test and returns its path."""
    return lambda *rows, name="rows.jsonl": write_lines(tmp_path / name, *rows)


@pytest.fixture
def load(write, tokenizer):
    """Loads rows, or what the arguments name, as the recipe does."""
    return lambda *rows, **arguments: rows_helper.load(
        tokenizer, **{"data_files": write(*rows) if rows else None, **arguments}
    )
