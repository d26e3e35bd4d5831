"""What contenders are given: a model's folder, rows, and how its tokenizer and weights are read."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tiny_job import instruct_dataset

ROWS, COPIES = {"stories260k": 4000, "smollm2": 1600}, {"stories260k": 2, "smollm2": 1}
WINDOW = 800  # rows, of which those of like length are put together: transformers' 50 batches


def arguments_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks on TOFU's rows have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder")
    return parser


def parse_with_model(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments with ``--model``."""
    parser.add_argument("--model", choices=sorted(ROWS), default="stories260k")
    options = parser.parse_args()
    if options.model == "smollm2" and options.model_dir is None:
        parser.error("--model smollm2 needs --model-dir")
    return options


def settings_of(model: str, data: Path, model_dir: Path | None, folder: Path) -> dict[str, Any]:
    """Settings of TOFU's rows in a seeded random order.

    Args:
        model: stories260k or smollm2.
        data: folder with tofu/ and stories260k/.
        model_dir: SmolLM2's Hugging Face folder.
        folder: for the rows.
    """
    lines = (data / "tofu" / "full.jsonl").read_text(encoding="utf-8").splitlines()[: ROWS[model]] * COPIES[model]
    random.Random(0).shuffle(lines)
    rows = [json.loads(line) for line in lines]
    if model == "stories260k":
        return llama_settings(data / model, rows, folder, data / model)
    return llama_settings(Path(str(model_dir)), rows, folder)


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
