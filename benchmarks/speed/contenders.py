"""The contenders: ways to take the same optimizer steps, 16 rows each, AdamW, gradients clipped to 1.

Each is a function that trains until its process is ended, called once per rank. All take the rows in the order of the file, so that a step
has the same rows with each; only TRL's steps have rows of like length. ``settings`` are what they are given: a model's folder, rows, and
how its tokenizer and weights are read.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import runpy
import sys
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.tiny_job import instruct_dataset, make_config

BATCH, LR, EPOCHS = 16, 1e-5, 1000
IGNORED = -100
ROWS, COPIES = {"stories260k": 4000, "smollm2": 1600}, {"stories260k": 2, "smollm2": 1}
WINDOW = 800  # rows, of which those of like length are put together: transformers' 50 batches
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


def arguments_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks on TOFU's rows have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder")
    return parser


def settings_of(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of TOFU's rows in a seeded random order.

    Args:
        model: stories260k or smollm2.
        options: those of :func:`arguments_parser`.
        folder: for the rows.
    """
    lines = (options.data / "tofu" / "full.jsonl").read_text(encoding="utf-8").splitlines()[: ROWS[model]]
    lines *= COPIES[model]
    random.Random(0).shuffle(lines)
    rows = [json.loads(line) for line in lines]
    if model == "stories260k":
        return llama_settings(options.data / model, rows, folder, options.data / model)
    if options.model_dir is None:
        sys.exit("--model smollm2 needs --model-dir")
    return llama_settings(options.model_dir, rows, folder)


def llama_settings(
    base: Path, rows: list[dict[str, str]], folder: Path, tokenizer_folder: Path | None = None
) -> dict[str, Any]:
    """Settings of any Llama and any rows: its ``folder``, ``model_type``, ``shapes`` of its linear layers, and ``config`` of a job.

    Args:
        base: the model's Hugging Face folder.
        rows: each with ``question`` and ``answer``.
        folder: the rows are written to.
        tokenizer_folder: of a SentencePiece tokenizer, for rows without a chat template; None: the model's own, with its template.
    """
    path = str(base.resolve())
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    dataset, written = instruct_dataset(file), list[Any](rows)
    if tokenizer_folder is None:
        keys = {"user": "question", "assistant": "answer"}
        written = [{"messages": [{"role": role, "content": row[key]} for role, key in keys.items()]} for row in rows]
        columns = {"conversation_column": "messages", "conversation_style": "openai"}
        dataset = {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": str(file),
            **columns,
        }
        tokenizer: dict[str, Any] = {"_component_": "finch.models.auto_tokenizer", "path": path}
    else:
        component = "torchtune.models.llama2.llama2_tokenizer"
        pieces = str(tokenizer_folder.resolve() / "tokenizer.model")
        tokenizer = {"_component_": component, "path": pieces, "max_seq_len": None, "prompt_template": None}
    file.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return {
        "folder": path,
        "model_type": "LLAMA3_2" if tokenizer_folder is None else "LLAMA2",
        "shapes": linear_shapes(json.loads((base / "config.json").read_text(encoding="utf-8"))),
        "config": {
            "model": {"_component_": "finch.models.auto", "path": path},
            "tokenizer": tokenizer,
            "dataset": {**dataset, "split": "train"},
        },
    }


def linear_shapes(sizes: dict[str, Any]) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of a Llama layer, from its config.json."""
    width, middle = sizes["hidden_size"], sizes["intermediate_size"]
    kv = sizes["num_key_value_heads"] * width // sizes["num_attention_heads"]
    return [(width, width), (width, kv), (width, kv), (width, width), (width, middle), (width, middle), (middle, width)]


class Lengths(NamedTuple):
    """Tokens and target tokens of each optimizer step of an epoch."""

    tokens: list[int]
    targets: list[int]

    @classmethod
    def of(cls, samples: list[dict[str, list[int]]], rows_per_step: int) -> Lengths:
        """
        Args:
            samples: each with ``tokens`` and ``labels`` (not shifted; -100 where ignored), in the order of the epoch.
        """
        steps = [samples[start : start + rows_per_step] for start in range(0, len(samples), rows_per_step)]
        return cls(
            [sum(len(row["tokens"]) for row in step) for step in steps],
            [sum(label != -100 for row in step for label in row["labels"][1:]) for step in steps],
        )


def group_by_length(samples: list[dict[str, list[int]]], rows_per_step: int) -> list[dict[str, list[int]]]:
    """The samples in an order in which a step's have like lengths, as transformers' ``group_by_length`` makes it: sorted within windows of
    800 rows. The steps are in a seeded random order, so that any few of them have all lengths."""
    steps = []
    for start in range(0, len(samples), WINDOW):
        window = sorted(samples[start : start + WINDOW], key=lambda row: len(row["tokens"]))
        steps += [window[first : first + rows_per_step] for first in range(0, len(window), rows_per_step)]
    random.Random(0).shuffle(steps)
    return [row for step in steps for row in step]


def config(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config that finch's recipe and torchtune's take.

    Args:
        settings: those of :func:`llama_settings`, and ``out``.
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
    from torchtune import training

    if recipe == "full_finetune_distributed":
        training.get_memory_stats = lambda device: {}
        training.log_memory_stats = lambda stats: None
        training.cleanup_before_training = gc.collect
    file = resources.files("torchtune") / ".." / "recipes" / f"{recipe}.py"
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
