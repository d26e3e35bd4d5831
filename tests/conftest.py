"""Fixtures: a small random Llama made on the spot, its tokenizer, rows of text, and finished runs that tests share."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

# Several processes at a time on few cores: one thread each. Nothing may be fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
if "HF_DATASETS_CACHE" not in os.environ:  # one of the session's own, which xdist's workers inherit
    _CACHE = tempfile.TemporaryDirectory(prefix="finch-tests-")
    os.environ["HF_DATASETS_CACHE"] = _CACHE.name

from helpers.ranks import close_rank_servers
from helpers.runs import FULL, ROOT, Run, run_here, validated, write_rows

from benchmarks.tiny_job import make_base, make_config


def pytest_collection_finish() -> None:
    """What the modules have imported is left out of collections, which a Trainer, a compilation and a run ask for: a second each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    close_rank_servers()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder by its name, which a function fills once for all workers of the session."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / "shared"
    root.mkdir(exist_ok=True)

    def get(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a test that failed there
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def base_folder(once) -> Path:
    """A Hugging Face folder: random Llama weights as transformers saves them, and a SentencePiece tokenizer trained here."""
    return once("base", make_base)


@pytest.fixture(scope="session")
def rows_file(once) -> Path:
    """41 question-answer rows of unequal lengths: an odd number, so that two ranks never share evenly."""
    return once("rows", lambda folder: write_rows(folder / "rows.jsonl", 41, seed=1)) / "rows.jsonl"


@pytest.fixture
def tiny(base_folder: Path, rows_file: Path, tmp_path: Path) -> Callable[..., dict]:
    """Makes a config of a small run in ``tmp_path / "run"``: 11 steps an epoch; ``is_validated``: with 7 rows for validation."""

    def make(is_validated: bool = False, **changes: Any) -> dict:
        config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
        return validated(config) if is_validated else config

    return make


@pytest.fixture(scope="session")
def trained(once) -> Callable[..., Run]:
    """Finished runs of a recipe in one process, each trained once for all tests of the session; these only read it.

    Takes a config, whose ``output_dir`` is replaced, and overrides.
    """

    def get(config: dict, *overrides: str, recipe: str = FULL) -> Run:
        text = json.dumps(config)
        key = f"{text.replace(config['output_dir'], '')} {overrides} {recipe}"
        name = hashlib.sha256(key.encode()).hexdigest()[:16]

        def fill(folder: Path) -> None:
            moved = json.loads(text.replace(config["output_dir"], str(folder / "run")))
            run = run_here(folder, moved, *overrides, recipe=recipe)
            assert run.returncode == 0, run.output[-3000:]
            (folder / "output.txt").write_text(run.output)

        folder = once(f"run_{name}", fill)
        return Run(0, (folder / "output.txt").read_text(), folder / "run")

    return get


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
