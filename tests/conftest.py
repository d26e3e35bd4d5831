"""Fixtures: a small random Llama made on the spot, its tokenizer, rows of text, and a way to start `tune run`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# Several processes at a time on few cores: one thread each. Nothing may be fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch

from benchmarks.tiny_text import make_rows, train_tokenizer

ROOT = Path(__file__).parent.parent


@dataclass
class Run:
    """What a finished `tune run` left behind."""

    returncode: int
    output: str
    folder: Path

    def metrics(self, validation: bool = False) -> list[dict]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if ("validation_loss" in line) == validation]

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics()]

    def error(self) -> str:
        """The one sentence a user's mistake must leave."""
        told = [line for line in self.output.splitlines() if line.startswith("finch: error: ")]
        assert len(told) == 1, self.output[-3000:]
        return told[0]


def llama_args(**changes: object) -> dict:
    """torchtune's arguments of the small model; also the source of its config.json."""
    return {
        "vocab_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 64,
        "intermediate_dim": 48,
        "norm_eps": 1e-5,
        **changes,
    }


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random Llama weights as transformers saves them, and a SentencePiece tokenizer trained here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    random.seed(0)
    train_tokenizer(folder, random)
    size = llama_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["embed_dim"],
        intermediate_size=size["intermediate_dim"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        num_key_value_heads=size["num_kv_heads"],
        max_position_embeddings=size["max_seq_len"],
        rms_norm_eps=size["norm_eps"],
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 question-answer rows of unequal lengths: an odd number, so that two ranks never share evenly."""
    random.seed(1)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(file, 41)
    return file


def write_rows(file: Path, number: int) -> None:
    """Rows that follow from where ``random`` stands."""
    make_rows(file, number, random)


def make_config(base: Path, rows: Path, run: Path, **changes: object) -> dict:
    """A config as a user would write it; ``changes`` replace top-level keys, None removes one."""
    config = {
        "output_dir": str(run),
        "model": {"_component_": "torchtune.models.llama2.llama2", **llama_args()},
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(base / "tokenizer.model"),
            "max_seq_len": 64,
            "prompt_template": None,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(run),
            "model_type": "LLAMA2",
        },
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(rows),
            "column_map": {"input": "question", "output": "answer"},
        },
        "seed": 0,
        "batch_size": 4,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-3, "weight_decay": 0.0, "fused": True},
        "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 5e-3, "init": "dataset"},
        "clip_grad_norm": 1.0,
        "device": "cpu",
        "dtype": "fp32",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def tune_run(
    folder: Path,
    config: dict,
    *overrides: str,
    ranks: int | None = None,
    recipe: str = "finch_full_finetune",
    timeout: int = 240,
    before: Sequence[str] = (),
) -> Run:
    """Starts the real `tune run` in a process of its own, in ``folder``; with ``ranks`` through torchrun. ``before``: a command that starts it."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    command = [*before, sys.executable, "-m", "torchtune._cli.tune", "run", *launcher, recipe]
    command += ["--config", str(file), *overrides]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False, env=environment()
    )
    return Run(done.returncode, done.stdout + done.stderr, Path(config["output_dir"]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a small Hugging Face folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def relative_l2(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two models over the norm of the second."""
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def environment(**changes: str) -> dict[str, str]:
    """The environment of a started process: torchrun's variables of an outer run would make it join that one."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**kept, "HF_HOME": kept.get("HF_HOME", "/tmp/finch-tests-hf"), **changes}


@pytest.fixture
def shared_data() -> Path:
    """Real data that is not part of the project; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("FINCH_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set FINCH_TEST_DATA")
    return folder


def run_here(folder: Path, config: dict, *overrides: str, recipe: str = "finch_full_finetune") -> Run:
    """Runs the recipe in this process, as `python -m finch_full_finetune` would: quicker than a process of its own."""
    import contextlib
    import importlib
    import io
    import logging
    from unittest import mock

    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    logging.getLogger("torchtune").addHandler(handler)
    code = 0
    with (
        mock.patch.object(sys, "argv", [recipe, "--config", str(file), *overrides]),
        contextlib.redirect_stderr(told),
    ):
        try:
            importlib.import_module(recipe).recipe_main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            logging.getLogger("torchtune").removeHandler(handler)
    return Run(code, told.getvalue(), Path(config["output_dir"]))
