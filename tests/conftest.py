"""Fixtures: a small random Llama made on the spot, its tokenizer, rows of text, and a way to start `tune run`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

# Several processes at a time on few cores: one thread each. Nothing may be fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from helpers.runs import ROOT, write_rows

from benchmarks.tiny_job import make_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random Llama weights as transformers saves them, and a SentencePiece tokenizer trained here."""
    folder = tmp_path_factory.mktemp("base")
    random.seed(0)  # for tests that draw rows
    make_base(folder)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 question-answer rows of unequal lengths: an odd number, so that two ranks never share evenly."""
    random.seed(1)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(file, 41)
    return file


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that is not part of the project; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("FINCH_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set FINCH_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct in fp32; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("FINCH_TEST_SMOLLM2", "/nowhere"))
    if not folder.is_dir():
        pytest.skip("FINCH_TEST_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
    return folder
