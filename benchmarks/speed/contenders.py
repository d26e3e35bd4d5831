"""The contenders: ways to take the same optimizer steps, 16 rows each, AdamW, gradients clipped to 1.

Each is a function that trains until its process is ended, called once per rank. All take the rows in the order of the file, so that a step has the same rows with each; only TRL's steps have rows of like length.
"""

from __future__ import annotations

import gc
import json
import math
import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.speed.rows import group_by_length
from benchmarks.tiny_job import make_config

BATCH, LR, EPOCHS = 16, 1e-5, 1000
IGNORED = -100
STOCK: dict[str, Any] = {  # what torchtune's recipes cannot do without
    "resume_from_checkpoint": False,
    "shuffle": False,
    "gradient_accumulation_steps": 1,
    "max_steps_per_epoch": None,
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "compile": False,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": False,
}


def config(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config that finch's recipe and torchtune's take.

    Args:
        settings: those of ``benchmarks.speed.rows``, and ``out``.
    """
    base, out = Path(settings["folder"]), Path(settings["out"])
    optimizer = {"_component_": "torch.optim.AdamW", "lr": LR, "weight_decay": 0.0, "fused": True}
    job = make_config(base, Path(), out, batch_size=BATCH, epochs=EPOCHS, optimizer=optimizer, lr_scheduler=None)
    job["checkpointer"] |= {"recipe_checkpoint": None, "model_type": settings["model_type"]}
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(out), "filename": "log.txt"}
    return {**job, **STOCK, "metric_logger": logger, **settings["config"], **changes}


def _run_recipe(run: Callable[..., Any], recipe: str, settings: dict[str, Any], **changes: Any) -> None:
    file = Path(f"{settings['out']}.{os.environ.get('RANK', 0)}.yaml")
    file.write_text(json.dumps(config(settings, **changes)), encoding="utf-8")
    sys.argv = [recipe, "--config", str(file)]
    run(recipe, run_name="__main__")


def finch(settings: dict[str, Any], **changes: Any) -> None:
    """finch's recipe."""
    schedule = {"_component_": "finch.FinchLR", "eta_max": 5e-5, "ema": 0.9, "init": 3.0}
    _run_recipe(runpy.run_module, "finch_full_finetune", settings, **{"lr_scheduler": schedule, **changes})


def finch_recomputed(settings: dict[str, Any]) -> None:
    """finch's recipe with logits in eight chunks, recomputed for the backward."""
    from finch.training import chunked_loss

    chunked_loss.chunks_for = lambda *_, **__: 8
    chunked_loss.head_of = lambda *_: None
    finch(settings)


def stock(settings: dict[str, Any], *, recipe: str, **changes: Any) -> None:
    """torchtune's stock recipe; the distributed one without the two calls that stop it on a CPU: reading memory statistics, and emptying
    the device's cache before training (``torch.cpu`` has none)."""
    import torchtune
    from torchtune import training

    if recipe == "full_finetune_distributed":
        training.get_memory_stats = lambda device: {}
        training.log_memory_stats = lambda stats: None
        training.cleanup_before_training = gc.collect
    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{recipe}.py"
    _run_recipe(runpy.run_path, str(file), settings, optimizer_in_bwd=False, **changes)


def samples_of(settings: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows as finch's recipe tokenizes them."""
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    cfg = OmegaConf.create(settings["config"])
    rows = instantiate(cfg.dataset, instantiate(cfg.tokenizer))
    return [{"tokens": list(map(int, row["tokens"])), "labels": list(map(int, row["labels"]))} for row in rows]


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(each) for each in values], batch_first=True, padding_value=fill)

    return {
        "input_ids": padded([row["tokens"] for row in rows], 0),
        "attention_mask": padded([[1] * len(row["tokens"]) for row in rows], 0),
        "labels": padded([row["labels"] for row in rows], IGNORED),
    }


def _transformers_model(settings: dict[str, Any]) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)


def _trainer_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": settings["out"], "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "learning_rate": LR,
        "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "weight_decay": 0.0, "optim": "adamw_torch_fused", "use_cpu": True,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": False, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip


def transformers_trainer(settings: dict[str, Any]) -> None:
    """transformers' Trainer on padded batches."""
    import transformers

    arguments = transformers.TrainingArguments(**_trainer_arguments(settings), remove_unused_columns=False)
    model, rows = _transformers_model(settings), samples_of(settings)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=_pad).train()


def trl_sft(settings: dict[str, Any]) -> None:
    """TRL's SFTTrainer at its fastest setting on a CPU: padded batches of rows of like length.

    Its padding-free batches run as well, but without flash attention a mask over all tokens of the batch takes their place.
    """
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"input_ids": row["tokens"], "completion_mask": [int(label != IGNORED) for label in row["labels"]]}
        for row in group_by_length(samples_of(settings), BATCH)
    ]
    model = _transformers_model(settings)
    arguments = SFTConfig(**_trainer_arguments(settings), bf16=False, max_length=None, completion_only_loss=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["folder"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()


def authors_loop(settings: dict[str, Any]) -> None:
    """The paper's program in a few lines: transformers, a padded batch, FINCH from ``loss.item()``."""
    rows = samples_of(settings)
    model = _transformers_model(settings)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    average = 3.0
    for start in [*range(0, len(rows), BATCH)] * EPOCHS:
        batch = _pad(rows[start : start + BATCH])
        labels = batch.pop("labels")
        logits = model(**batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        average = 0.9 * average + 0.1 * loss.item()
        optimizer.param_groups[0]["lr"] = min(LR / math.sqrt(average + 1e-8), 5e-5)
        optimizer.step()
        optimizer.zero_grad()


CONTENDERS: dict[str, Callable[..., None]] = {
    "finch": finch,
    "finch_constant": partial(finch, lr_scheduler=None),
    "finch_padded": partial(finch, lr_scheduler=None, padding_free=False),
    "torchtune_single_device": partial(stock, recipe="full_finetune_single_device"),
    "transformers_trainer": transformers_trainer,
    "trl_sft": trl_sft,
    "authors_loop": authors_loop,
    # On 2 processes, 8 rows each
    "finch_2_ranks": partial(finch, batch_size=BATCH // 2),
    "torchtune_distributed": partial(stock, recipe="full_finetune_distributed", batch_size=BATCH // 2),
}
