"""A small training job from scratch: random Llama weights, a tokenizer, a config, and the command that starts the recipe."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from torchtune.models.llama2 import llama2

from benchmarks.tiny_text import VOCAB_SIZE, train_tokenizer
from finch.weights.huggingface import HuggingFaceFolder

ROOT = Path(__file__).parents[1]
MAX_SEQ_LEN = 64
TINY = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48}


def make_base(folder: Path, size: dict[str, int] = TINY) -> int:
    """Writes a Hugging Face folder with random weights and a SentencePiece tokenizer; returns the number of parameters.

    Args:
        folder: must not exist.
        size: arguments of torchtune's ``llama2``, see ``TINY``.
    """
    source = folder.with_name(folder.name + ".source")
    source.mkdir(parents=True)
    train_tokenizer(source, random.Random(0))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size["embed_dim"],
        "intermediate_size": size["intermediate_dim"],
        "num_hidden_layers": size["num_layers"],
        "num_attention_heads": size["num_heads"],
        "num_key_value_heads": size["num_kv_heads"],
        "max_position_embeddings": MAX_SEQ_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (source / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    torch.manual_seed(0)
    decoder = llama2(vocab_size=VOCAB_SIZE, max_seq_len=MAX_SEQ_LEN, **size)
    for name, parameter in decoder.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2 if size is TINY else 0.02)
    HuggingFaceFolder(str(source), checkpoint_files=[]).write(decoder.state_dict().items(), folder, is_writer=True)
    shutil.rmtree(source)
    return sum(parameter.numel() for parameter in decoder.parameters())


def write_config(file: Path, *, base: Path, rows: Path, run: Path, size: dict[str, int] = TINY, **changes: Any) -> None:
    """Writes a config of the recipe: FINCH on the CPU in fp32, with attention dropout so that random states matter.

    Args:
        changes: replace top-level keys; ``held_out``, a file, becomes the validation rows.
    """

    def dataset(source: Path) -> dict[str, Any]:
        columns = {"input": "question", "output": "answer"}
        component = "torchtune.datasets.instruct_dataset"
        return {"_component_": component, "source": "json", "data_files": str(source), "column_map": columns}

    held_out = changes.pop("held_out", None)
    config = {
        "output_dir": str(run),
        "model": {
            "_component_": "torchtune.models.llama2.llama2",
            "vocab_size": VOCAB_SIZE,
            "max_seq_len": MAX_SEQ_LEN,
            "attn_dropout": 0.1,
            **size,
        },
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(base / "tokenizer.model"),
            "max_seq_len": MAX_SEQ_LEN,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(run),
            "model_type": "LLAMA2",
        },
        "dataset": dataset(rows),
        **({} if held_out is None else {"dataset_validation": dataset(held_out)}),
        "seed": 0,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-3, "weight_decay": 0.01, "fused": True},
        "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 5e-3, "init": "dataset"},
        "clip_grad_norm": 1.0,
        "device": "cpu",
        "dtype": "fp32",
        **changes,
    }
    file.write_text(yaml.safe_dump(config), encoding="utf-8")


def launch_command(recipe: str, config: Path, *overrides: str, ranks: int) -> list[str]:
    """Starts the module ``recipe`` on ``ranks`` processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*torchrun, "-m", recipe, "--config", str(config), *overrides]


def launch_environment(**changes: str) -> dict[str, str]:
    """The environment of ``launch_command``: this repository first on Python's path, no downloads."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    offline = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**os.environ, **offline, "PYTHONPATH": path, **changes}
