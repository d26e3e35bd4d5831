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

import torch
from helpers.runs import ROOT, llama_args, write_rows

from benchmarks.tiny_text import train_tokenizer


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


@pytest.fixture
def shared_data() -> Path:
    """Real data that is not part of the project; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("FINCH_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set FINCH_TEST_DATA")
    return folder
