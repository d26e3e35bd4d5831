"""The contenders: ways to take the same optimizer steps, 16 rows each, AdamW, gradients clipped to 1.

Each is a function that trains until its process is ended, called once per rank. All take the rows in the order of the file, so that a step has the same rows with each; only TRL's steps have rows of like length.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.speed.rows import group_by_length
from benchmarks.tiny_job import make_config

BATCH, LR, EPOCHS = 16, 1e-5, 1000
IGNORED = -100


def config(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config that finch's recipe and torchtune's take.

    Args:
        settings: ``folder``, ``model``, ``tokenizer``, ``model_type``, ``rows``, ``is_plain`` (question-answer rows, not chats) and ``out``;
            ``batch_size``, the rows of a rank, by default all 16.
    """
    job = make_config(
        Path(settings["folder"]),
        Path(settings["rows"]),
        Path(settings["out"]),
        model=settings["model"],
        tokenizer=settings["tokenizer"],
        lr_scheduler=None,
        batch_size=settings.get("batch_size", BATCH),
        epochs=EPOCHS,
        optimizer={"_component_": "torch.optim.AdamW", "lr": LR, "weight_decay": 0.0, "fused": True},
    )
    job["checkpointer"] |= {"recipe_checkpoint": None, "model_type": settings["model_type"]}
    if not settings["is_plain"]:
        del job["dataset"]["column_map"]
        columns = {"conversation_column": "messages", "conversation_style": "openai"}
        job["dataset"] |= {"_component_": "torchtune.datasets.chat_dataset", **columns}
    job["dataset"]["split"] = "train"
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": settings["out"]}
    stock = {  # what torchtune's recipes cannot do without
        "resume_from_checkpoint": False,
        "shuffle": False,
        "gradient_accumulation_steps": 1,
        "max_steps_per_epoch": None,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "compile": False,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "metric_logger": {**logger, "filename": "log.txt"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }
    return {**job, **stock, **changes}


def _run_recipe(name: str, settings: dict[str, Any], **changes: Any) -> None:
    from omegaconf import OmegaConf

    file = Path(settings["out"] + ".configs") / f"{os.environ.get('RANK', 0)}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config(settings, **changes)), file)
    sys.argv = [name, "--config", str(file)]
    if name.startswith("finch"):
        runpy.run_module(name, run_name="__main__")
    else:
        runpy.run_path(_stock(name), run_name="__main__")


def _stock(name: str) -> str:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent.parent / "recipes" / f"{name}.py")


def finch(settings: dict[str, Any]) -> None:
    """finch's recipe. ``logits_chunks``: a number of chunks in which logits are computed, and recomputed for the backward."""
    if "logits_chunks" in settings:
        from finch.training import chunked_loss

        chunked_loss.chunks_for = lambda *_, **__: settings["logits_chunks"]
        chunked_loss.head_of = lambda *_: None  # recomputed in the backward
    schedule = {"_component_": "finch.FinchLR", "eta_max": 5e-5, "ema": 0.9, "init": 3.0}
    _run_recipe("finch_full_finetune", settings, lr_scheduler=schedule)


def finch_constant(settings: dict[str, Any]) -> None:
    """finch's recipe with a constant learning rate."""
    _run_recipe("finch_full_finetune", settings)


def finch_padded(settings: dict[str, Any]) -> None:
    """finch's recipe on padded batches."""
    _run_recipe("finch_full_finetune", settings, padding_free=False)


def finch_2_ranks(settings: dict[str, Any]) -> None:
    """finch's recipe on 2 processes, 8 rows each: what torchtune's distributed recipe is compared with."""
    finch({**settings, "batch_size": BATCH // 2})


def torchtune_single_device(settings: dict[str, Any]) -> None:
    """torchtune's stock recipe."""
    _run_recipe("full_finetune_single_device", settings, optimizer_in_bwd=False)


def torchtune_distributed(settings: dict[str, Any]) -> None:
    """torchtune's stock recipe on 2 processes, 8 rows each, without the two calls that stop it on a CPU: reading memory statistics, and
    emptying the device's cache before training (``torch.cpu`` has none)."""
    from torchtune import training

    training.get_memory_stats = lambda device: {}
    training.log_memory_stats = lambda stats: None
    training.cleanup_before_training = gc.collect
    _run_recipe("full_finetune_distributed", {**settings, "batch_size": BATCH // 2}, optimizer_in_bwd=False)


def samples_of(settings: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows as finch's recipe tokenizes them."""
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    cfg = OmegaConf.create(config(settings))
    rows = instantiate(cfg.dataset, instantiate(cfg.tokenizer))
    return [{"tokens": list(map(int, row["tokens"])), "labels": list(map(int, row["labels"]))} for row in rows]


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["tokens"]) for row in rows)

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([each + [fill] * (longest - len(each)) for each in values])

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

    rows = samples_of(settings)
    model = _transformers_model(settings)
    arguments = transformers.TrainingArguments(**_trainer_arguments(settings), remove_unused_columns=False)
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
    for _ in range(EPOCHS):
        for start in range(0, len(rows), BATCH):
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


CONTENDERS: dict[str, Callable[[dict[str, Any]], None]] = {
    one.__name__: one
    for one in (
        finch,
        finch_constant,
        finch_padded,
        torchtune_single_device,
        transformers_trainer,
        trl_sft,
        authors_loop,
        finch_2_ranks,
        torchtune_distributed,
    )
}
