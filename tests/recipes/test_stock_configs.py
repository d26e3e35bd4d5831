"""Configs as torchtune ships them, the model shrunk: the loss curve of plain SFT is the stock recipe's."""

import contextlib
import io
import json
import random
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torchtune
from helpers.models import FAMILIES, save
from helpers.runs import run_here
from helpers.tokenizers import write_llama3_tokenizer
from omegaconf import OmegaConf

from benchmarks.tiny_text import WORDS

pytestmark = pytest.mark.slow

RECIPES = Path(torchtune.__file__).parent.parent / "recipes"
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
    import sentencepiece

    random.seed(0)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(random.choices(WORDS, k=8)) for _ in range(400)))
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=70,
        hard_vocab_limit=False,
        minloglevel=2,
        **ids,
    )
    return [f"tokenizer.path={folder}/tokenizer.model"]


def stock(folder: Path, arguments: list[str]) -> list[float]:
    """The losses that torchtune's own recipe logs, run here."""
    logger = [f"metric_logger.log_dir={folder}", "metric_logger.filename=stock.txt"]
    with (
        mock.patch.object(
            sys, "argv", ["full_finetune_single_device", *arguments, *logger, f"output_dir={folder}/stock"]
        ),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(RECIPES / "full_finetune_single_device.py"), run_name="__main__")
    lines = [line for line in (folder / "stock.txt").read_text().splitlines() if "loss:" in line]
    return [float(line.split("loss:")[1].split()[0]) for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_stock_config_has_the_stock_recipes_losses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    family, vocabulary, changes, tolerance = CASES[name]
    save(family, tmp_path / "base", vocab_size=vocabulary)
    random.seed(1)
    rows = [
        {
            "instruction": " ".join(random.choices(WORDS, k=3)),
            "input": "",
            "output": " ".join(random.choices(WORDS, k=random.randint(1, 7))),
        }
        for _ in range(32)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The file as shipped, but for the model's size, the places of files, the machine, and numbers that show a difference.
    config = OmegaConf.load(RECIPES / "configs" / f"{name}.yaml")
    config.model = {
        "_component_": FAMILIES[family].component,
        **FAMILIES[family].arguments,
        "vocab_size": vocabulary,
    }
    config.dataset.update(source="json", data_files=str(tmp_path / "rows.jsonl"))
    file = tmp_path / "config.yaml"
    OmegaConf.save(config, file)
    arguments = [
        "--config",
        str(file),
        f"checkpointer.checkpoint_dir={tmp_path}/base",
        "checkpointer.checkpoint_files=[model.safetensors]",
        *write_tokenizer(family, tmp_path / "base"),
        "tokenizer.max_seq_len=64",
        "device=cpu",
        "dtype=fp32",
        "seed=0",
        "epochs=2",
        "optimizer.lr=1e-3",
        *(["enable_activation_offloading=False"] if config.enable_activation_offloading else []),
        *changes,
    ]
    reference = stock(tmp_path, arguments)
    result = run_here(tmp_path, OmegaConf.to_container(config), *arguments[2:], f"output_dir={tmp_path}/result")
    assert result.returncode == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "result" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(reference) >= 4  # packed rows are few
    difference = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    print(
        f"{name}: {len(losses)} steps, loss {reference[0]:.4f} to {reference[-1]:.4f}, largest relative difference {difference:.1e}"
    )
    assert reference[-1] < 0.98 * reference[0]  # training moves the loss by far more than the tolerance
    assert difference < tolerance
