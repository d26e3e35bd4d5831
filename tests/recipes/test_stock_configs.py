"""Configs as torchtune ships them, the model shrunk: the loss curve of plain SFT is the stock recipe's."""

import json
import random
from pathlib import Path

import pytest
import yaml
from helpers.models import FAMILIES, save
from helpers.rows import write_lines
from helpers.runs import finished, stock_losses, stock_recipes
from helpers.tokenizers import write_llama3_tokenizer

from benchmarks.tiny_text import WORDS, train_tokenizer

pytestmark = pytest.mark.slow

# config; the small model; vocabulary of its tokenizer; overrides beside those of every case; relative tolerance
CASES = {
    "qwen2_5/0.5B_full_single_device": ("qwen2 tied", 151_936, ["dataset.packed=True", "compile=True"], 2e-5),
    # With the optimizer in the backward the stock recipe does not divide gradients by the number of tokens, which AdamW
    # feels through its eps alone (1.2e-7 without); 8-bit states round besides.
    "llama3_2/1B_full_single_device": ("llama 3.2", 128_256, [], 2e-4),
    "mistral/7B_full": ("mistral", 96, ["fsdp_cpu_offload=True", "custom_sharded_layers=[tok_embeddings]"], 2e-5),
    "phi3/mini_full_low_memory": ("phi3", 32_064, [], 1e-4),
    "gemma/2B_full": ("gemma", 96, ["loss.num_output_chunks=3"], 2e-5),
    "llama2/7B_full": (
        "llama",
        96,
        ["enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2"],
        2e-5,
    ),
}


def write_tokenizer(family: str, folder: Path) -> list[str]:
    """Small files in the family's format; returns the overrides that name them."""
    if family == "llama 3.2":
        write_llama3_tokenizer(folder)
        return [f"tokenizer.path={folder}/original/tokenizer.model"]
    if family == "qwen2 tied":
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        symbols = list(bytes_to_unicode().values())
        (folder / "vocab.json").write_text(json.dumps({symbol: index for index, symbol in enumerate(symbols)}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        return [f"tokenizer.path={folder}/vocab.json", f"tokenizer.merges_file={folder}/merges.txt"]
    train_tokenizer(folder, random.Random(0))
    return [f"tokenizer.path={folder}/tokenizer.model"]


@pytest.mark.parametrize("name", CASES)
def test_stock_config_has_the_stock_recipes_losses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    family, vocabulary, changes, tolerance = CASES[name]
    save(family, tmp_path / "base", vocab_size=vocabulary)
    rng = random.Random(1)

    def words(number):
        return " ".join(rng.choices(WORDS, k=number))

    rows = [{"instruction": words(3), "input": "", "output": words(rng.randint(1, 7))} for _ in range(32)]
    # The file as shipped, but for the model's size, the places of files, the machine, and numbers that show a difference.
    config = yaml.safe_load((stock_recipes() / "configs" / f"{name}.yaml").read_text())
    config["model"] = FAMILIES[family].config(vocab_size=vocabulary)
    config["dataset"] |= {"source": "json", "data_files": write_lines(tmp_path / "rows.jsonl", *rows)}
    overrides = [
        f"checkpointer.checkpoint_dir={tmp_path}/base",
        "checkpointer.checkpoint_files=[model.safetensors]",
        *write_tokenizer(family, tmp_path / "base"),
        "tokenizer.max_seq_len=64",
        "device=cpu",
        "dtype=fp32",
        "seed=0",
        "epochs=2",
        "optimizer.lr=1e-3",
        *(["enable_activation_offloading=False"] if config.get("enable_activation_offloading") else []),
        *changes,
    ]
    reference = stock_losses(tmp_path, config, *overrides)
    losses = finished(tmp_path, config, *overrides).column("loss")
    assert len(reference) >= 4  # packed rows are few
    assert reference[-1] < 0.98 * reference[0]  # training moves the loss by far more than the tolerance
    assert losses == pytest.approx(reference, rel=tolerance, abs=0)
