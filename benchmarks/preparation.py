"""The CPU time of preparing rows, divided by that of the tokenizer alone for the same texts:

python -m benchmarks.preparation DIR [--rows 5000] [--words 60] [--rounds 5]

DIR is a model's folder with a tokenizer and a chat template. ``--rows`` conversations of two turns with ``--words`` words each are rendered
and encoded by tokenizers' encode_batch_fast (the texts rendered before), finch (file, format, tokens and statistics, as `finch check` reads
them), finch again with what the first time kept, and TRL's SFTTrainer, nothing of which is kept. They alternate in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from omegaconf import OmegaConf

from benchmarks.processes import alternate, machine, print_times
from benchmarks.tiny_text import WORDS
from finch.base.errors import report_user_errors
from finch.data.dataset import load_dataset
from finch.data.stats import collect_stats
from finch.models import auto_tokenizer


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        file = Path(folder, "rows.jsonl")
        rows = [_row(random.Random(number), args.words) for number in range(args.rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        runs = _runs(args.model, file, rows)
        for run in runs.values():
            run()
        times = alternate(runs, args.rounds, clock=lambda: sum(os.times()[:4]))  # with children
    print(f"{args.rows} rows of {args.words} words in each of two turns; CPU time; {args.rounds} rounds; {machine()}")
    print_times(times)


def _row(rng: random.Random, words: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": " ".join(rng.choices(WORDS, k=words))} for role in roles]}


def _runs(folder: Path, file: Path, rows: list[dict[str, Any]]) -> dict[str, Callable[[], object]]:
    """What is timed, by its name."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer, other = auto_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    texts: Any = other.apply_chat_template([row["messages"] for row in rows], tokenize=False)
    cfg = OmegaConf.create(
        {"dataset": {"_component_": "finch.data.rows.rows_dataset", "data_files": str(file), "format": "auto"}}
    )
    size: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(other), **size))
    options = SFTConfig(str(file.parent), report_to=[], max_length=None, use_cpu=True, bf16=False)

    def again() -> None:
        collect_stats(load_dataset(cfg, "dataset", tokenizer), 0, 1)

    def first() -> None:
        shutil.rmtree(datasets.config.HF_DATASETS_CACHE, ignore_errors=True)
        again()

    def trl() -> None:
        datasets.disable_caching()
        SFTTrainer(model, options, train_dataset=datasets.Dataset.from_list(rows), processing_class=other)

    return {
        "encode_batch_fast": lambda: other.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False),
        "finch": first,
        "finch again": again,
        "TRL": trl,
    }


if __name__ == "__main__":
    main()
