"""A pretrained folder, rows and configs of small real runs: random weights, a tokenizer of single bytes, text of a few words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from finch.gpu_check.models import Model, Weights, config_blocks
from finch.models.qwen3 import qwen3_tune_to_hf

_SPECIAL = ["<pad>", "<eos>"]
_WORDS = ("the", "old", "red", "bird", "fox", "river", "stone", "sings", "runs", "near", "under", "often", "never")
_HF_NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_word_embeddings",
}


def huggingface_config(model: Model) -> dict[str, Any]:
    """config.json of a Qwen3."""
    sizes = {_HF_NAMES[name]: value for name, value in model.sizes.items() if name in _HF_NAMES}
    return {**sizes, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "pad_token_id": 0, "eos_token_id": 1}


def write_base(folder: Path, model: Model, weights: Weights) -> None:
    """A Hugging Face folder of a Qwen3."""
    folder.mkdir()
    stored = {name: weight.contiguous() for name, weight in qwen3_tune_to_hf(weights).items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**kind, **huggingface_config(model)}), encoding="utf-8")
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json whose tokens are single bytes, and its settings."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_rows(file: Path, number: int) -> None:
    """Question-answer rows of unequal lengths as JSON lines."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))

    rows = [{"question": words(3, 8), "answer": words(2, 9)} for _ in range(number)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_blocks(folder: Path, model: Model, name: str, **changes: Any) -> dict[str, Any]:
    """The config of a real run in ``folder / name`` on the folder's base and rows."""
    base, run = str(folder / "base"), str(folder / name)
    blocks = config_blocks(folder, model, **changes)
    return {
        **blocks,
        "output_dir": run,
        "checkpointer": {**blocks["checkpointer"], "checkpoint_dir": base, "output_dir": run, "model_type": "QWEN3"},
        "tokenizer": {"_component_": "finch.models.auto_tokenizer", "path": base},
        "dataset": {"_component_": "finch.data.rows.rows_dataset", "data_files": str(folder / "rows.jsonl")},
        "shuffle": True,
    }
