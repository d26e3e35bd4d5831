"""Tokens per second of finch's recipe against ranks, sequence length and model size, on a CPU, fp32, AdamW.

    python -m benchmarks.scaling --data DATA [--model-dir SMOLLM2]

- Ranks: 1, 2 and 4 with one thread each (gloo), 8 TOFU rows per rank. More ranks than cores are oversubscribed.
- Length: rows of exactly that many tokens, 4,096 tokens per step, a random Llama of 14 M parameters, all cores.
- Size: 16 TOFU rows per step, all cores; SmolLM2-135M only with --model-dir.

The programs of a table alternate in blocks of steps. "of matmul" is the rate of needed FLOPs (see benchmarks.speed) over the rate of
matrix products at the model's shapes on as many threads, at most the machine's cores, measured between the blocks.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.processes import machine, num_cores, print_line
from benchmarks.speed.blocks import Contender, matmul_rate, start_all
from benchmarks.speed.contenders import BATCH, finch, samples_of
from benchmarks.speed.rows import Lengths, arguments_parser, llama_settings, settings_of
from benchmarks.tiny_job import make_llama

RANKS, ROWS_PER_RANK = (1, 2, 4), 8
LENGTHS, TOKENS_PER_STEP = (128, 512, 1024, 2048), 4096
MAX_STEPS = 50  # of a length
BLOCKS, BLOCK_S = 4, 2.0  # a block has as many steps as fit into BLOCK_S, at least one, and stays within the epoch
WARM_UP = 2  # steps before the first block
# Between stories260k and SmolLM2 in size, for stories260k's tokenizer
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 1088,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


class Case(NamedTuple):
    """A run of the recipe.

    Attributes:
        rows: of a rank's step.
        threads: of each rank.
    """

    name: str
    settings: dict[str, Any]
    rows: int = BATCH
    ranks: int = 1
    threads: int | None = None


def main() -> None:
    options = arguments_parser(__doc__).parse_args()
    print(f"{machine()}, fp32")
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), options.data / "stories260k"
        llama = folder / "llama"
        make_llama(llama, **SIZES, max_position_embeddings=max(LENGTHS))
        small = settings_of("stories260k", options.data, None, folder / "small")
        questions = [
            json.loads(line) for line in (folder / "small" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        middle = llama_settings(llama, questions, folder / "middle", tokenizer)
        for title, settings in (("0.3 M", small), ("14 M", middle)):
            cases = [Case(f"{ranks} rank(s)", settings, ROWS_PER_RANK, ranks, threads=1) for ranks in RANKS]
            _measure(f"{title} parameters, {ROWS_PER_RANK} TOFU rows per rank, one thread each", cases, folder)
        cases = []
        for length in LENGTHS:
            answers = " ".join(row["answer"] for row in questions[: 2 + length // 20])
            number = TOKENS_PER_STEP // length
            rows = [{"question": row["question"], "answer": answers} for row in questions[: MAX_STEPS * number]]
            settings = llama_settings(llama, rows, folder / str(length), tokenizer)
            settings["config"]["tokenizer"]["max_seq_len"] = length
            cases.append(Case(f"{length} tokens", settings, number))
        _measure(f"14 M parameters, {TOKENS_PER_STEP:,} tokens per step, all cores", cases, folder)
        cases = [Case("0.3 M", small), Case("14 M", middle)]
        if options.model_dir is not None:
            cases.append(Case("135 M", settings_of("smollm2", options.data, options.model_dir, folder / "large")))
        _measure(f"{BATCH} TOFU rows per step, all cores", cases, folder)


def _measure(title: str, cases: list[Case], folder: Path) -> None:
    """Runs the cases in turns and prints their table."""
    runs = [
        Contender(
            case.name,
            partial(finch, batch_size=case.rows),
            case.settings,
            folder / title,
            ranks=case.ranks,
            threads=case.threads,
        )
        for case in cases
    ]
    start_all(runs)
    lengths = [Lengths.of(samples_of(case.settings), case.ranks * case.rows) for case in cases]
    steps = []
    for run, each in zip(runs, lengths, strict=True):
        possible = int(BLOCK_S / run.run(1).seconds)
        steps.append(max(1, min(possible, (len(each.tokens) - WARM_UP) // BLOCKS)))
    seconds, rates = [0.0] * len(cases), [0.0] * len(cases)
    for _ in range(BLOCKS):
        for number, (case, run) in enumerate(zip(cases, runs, strict=True)):
            seconds[number] += run.run(steps[number]).seconds
            torch.set_num_threads(min(num_cores(), case.ranks * (case.threads or num_cores())))
            rates[number] += matmul_rate(lengths[number].tokens[0], case.settings["shapes"]) / BLOCKS
    print(f"\n{title}")
    print_line("", "step, s", "tokens/s", "targets/s", "GFLOP/s", "of matmul", "matmul GFLOP/s", width=15)
    for number, (case, run, each) in enumerate(zip(cases, runs, lengths, strict=True)):
        run.close()
        timed = slice(WARM_UP, WARM_UP + BLOCKS * steps[number])
        tokens = sum(each.tokens[timed]) / seconds[number]
        flops = run.flops * tokens / each.tokens[0]  # those of the first step, by its tokens
        print_line(
            case.name,
            f"{seconds[number] / BLOCKS / steps[number]:.3f}",
            f"{tokens:,.0f}",
            f"{sum(each.targets[timed]) / seconds[number]:,.0f}",
            f"{flops / 1e9:,.1f}",
            f"{flops / rates[number]:.0%}",
            f"{rates[number] / 1e9:,.1f}",
            width=15,
        )


if __name__ == "__main__":
    main()
