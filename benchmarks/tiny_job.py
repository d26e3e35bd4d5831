"""A small training job from scratch: random Llama weights, a tokenizer, a config, and how torchrun starts it. Tests use it as well."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_text import VOCAB_SIZE, train_tokenizer

ROOT = Path(__file__).parents[1]
TINY = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48}
OFFLINE = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def llama_args(**changes: Any) -> dict[str, Any]:
    """The arguments of torchtune's ``llama2``; also the source of the model's config.json."""
    return {"vocab_size": VOCAB_SIZE, "max_seq_len": 64, "norm_eps": 1e-5, **TINY, **changes}


def make_llama(folder: Path, *, max_shard_size: str = "50GB", **sizes: Any) -> int:
    """Writes a Hugging Face folder of random fp32 weights, without a tokenizer. Returns their bytes.

    Args:
        sizes: of transformers' ``LlamaConfig``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return sum(parameter.nbytes for parameter in model.parameters())


def make_base(folder: Path, std: float = 0.2, **size: int) -> None:
    """Writes a Hugging Face folder: random weights as transformers saves them, and a SentencePiece tokenizer trained here.

    Args:
        folder: created if missing.
        std: of the weights.
        size: changes of ``llama_args``.
    """
    folder.mkdir(exist_ok=True)
    train_tokenizer(folder, random.Random(0))
    arguments = llama_args(**size)
    make_llama(
        folder,
        vocab_size=arguments["vocab_size"],
        hidden_size=arguments["embed_dim"],
        intermediate_size=arguments["intermediate_dim"],
        num_hidden_layers=arguments["num_layers"],
        num_attention_heads=arguments["num_heads"],
        num_key_value_heads=arguments["num_kv_heads"],
        max_position_embeddings=arguments["max_seq_len"],
        rms_norm_eps=arguments["norm_eps"],
        initializer_range=std,
    )


def instruct_dataset(rows: Path) -> dict[str, Any]:
    """The ``dataset`` block of question-answer rows."""
    columns = {"input": "question", "output": "answer"}
    component = "torchtune.datasets.instruct_dataset"
    return {"_component_": component, "source": "json", "data_files": str(rows), "column_map": columns}


def make_config(base: Path, rows: Path, run: Path, **changes: Any) -> dict[str, Any]:
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
        "dataset": instruct_dataset(rows),
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


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command that starts ``arguments`` on ``ranks`` processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *arguments]


def environment(*paths: Path, **changes: str) -> dict[str, str]:
    """The environment of a started process: no downloads, ``paths`` first on Python's path, and none of the variables with which it
    would join an outer torchrun."""
    kept = {key: value for key, value in os.environ.items() if key not in TORCHRUN_VARIABLES}
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [kept.get("PYTHONPATH")])])
    return {"HF_HOME": "/tmp/finch-tests-hf", **kept, **OFFLINE, **changes}
