"""Tokens a second of finch's recipe against ranks, sequence length and model size, on a CPU, fp32, AdamW.

    python -m benchmarks.scaling --data DATA [--model-dir SMOLLM2]

- Ranks: 1, 2 and 4 with one thread each (gloo), 8 TOFU rows a rank. More ranks than cores are oversubscribed.
- Length: rows of exactly that many tokens, 4,096 tokens a step, a random Llama of 14 M parameters, all cores.
- Size: 16 TOFU rows a step, all cores; SmolLM2-135M only with --model-dir.

The programs of a table alternate in blocks of steps. "of matmul" is the rate of needed FLOPs (see benchmarks.speed) over the rate of
matrix products at the model's shapes on as many threads, at most the machine's cores, measured between the blocks.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.scaling.models import make_llama
from benchmarks.speed.contenders import BATCH, samples_of
from benchmarks.speed.matmul import matmul_rate
from benchmarks.speed.paired import Contender, num_cores, start_all
from benchmarks.speed.settings import Lengths, llama_settings, settings_of

RANKS, ROWS_A_RANK = (1, 2, 4), 8
LENGTHS, TOKENS_A_STEP = (128, 512, 1024, 2048), 4096
MAX_STEPS = 50  # of a length
BLOCKS, BLOCK_S = 4, 2.0  # a block has as many steps as fit into BLOCK_S, at least one, and stays within the epoch
WARM_UP = 2  # steps before the first block


@dataclass(frozen=True)
class Case:
    """A run of the recipe.

    Attributes:
        name: of its line in the table.
        settings: of ``benchmarks.speed.contenders.finch``.
        ranks: processes.
        threads: of each rank.
    """

    name: str
    settings: dict[str, Any]
    ranks: int = 1
    threads: int | None = None

    @property
    def rows_a_step(self) -> int:
        return self.ranks * int(self.settings["batch_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {num_cores()} cores, {platform.machine()}, fp32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama = folder / "llama"
        make_llama(llama, max_seq_len=max(LENGTHS))
        small = settings_of("stories260k", args.data, None, _subfolder(folder, "small"))
        questions = [json.loads(line) for line in Path(small["rows"]).read_text(encoding="utf-8").splitlines()]
        tokenizer = args.data / "stories260k"
        middle = llama_settings(llama, questions, _subfolder(folder, "middle"), tokenizer_folder=tokenizer)
        for title, settings in (("0.3 M", small), ("14 M", middle)):
            cases = [
                Case(f"{ranks} rank{'s' if ranks > 1 else ''}", {**settings, "batch_size": ROWS_A_RANK}, ranks, 1)
                for ranks in RANKS
            ]
            _measure(f"{title} parameters, {ROWS_A_RANK} TOFU rows a rank, one thread each", cases, folder)
        cases = []
        for length in LENGTHS:
            answers = " ".join(row["answer"] for row in questions[: 2 + length // 20])
            rows_a_step = TOKENS_A_STEP // length
            rows = [{"question": row["question"], "answer": answers} for row in questions[: MAX_STEPS * rows_a_step]]
            settings = llama_settings(llama, rows, _subfolder(folder, str(length)), tokenizer_folder=tokenizer)
            settings["tokenizer"]["max_seq_len"] = length
            cases.append(Case(f"{length} tokens", {**settings, "batch_size": rows_a_step}))
        _measure(f"14 M parameters, {TOKENS_A_STEP:,} tokens a step, all cores", cases, folder)
        cases = [Case("0.3 M", {**small, "batch_size": BATCH}), Case("14 M", {**middle, "batch_size": BATCH})]
        if args.model_dir is not None:
            large = settings_of("smollm2", args.data, args.model_dir, _subfolder(folder, "large"))
            cases.append(Case("135 M", {**large, "batch_size": BATCH}))
        _measure(f"{BATCH} TOFU rows a step, all cores", cases, folder)


def _subfolder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def _measure(title: str, cases: list[Case], folder: Path) -> None:
    """Runs the cases in turns and prints their table."""
    runs = []
    for number, case in enumerate(cases):
        out = f"{folder}/{title}-{number}"
        log = Path(f"{out}.log")
        runs.append(Contender("finch", {**case.settings, "out": out}, log, ranks=case.ranks, threads=case.threads))
    start_all(runs)
    lengths = [Lengths.of(samples_of(case.settings), case.rows_a_step) for case in cases]
    steps = []
    for run, each in zip(runs, lengths, strict=True):
        possible = int(BLOCK_S / run.run(1)["wall_s"])
        steps.append(max(1, min(possible, (len(each.tokens) - WARM_UP) // BLOCKS)))
    seconds, rates = [0.0] * len(cases), [0.0] * len(cases)
    for _ in range(BLOCKS):
        for number, (case, run) in enumerate(zip(cases, runs, strict=True)):
            seconds[number] += run.run(steps[number])["wall_s"]
            torch.set_num_threads(min(num_cores(), case.ranks * (case.threads or num_cores())))
            rates[number] += matmul_rate(lengths[number].tokens[0], case.settings["shapes"], 0.5) / BLOCKS
    for run in runs:
        run.close()
    print(f"\n{title}")
    print(
        f"{'':14}{'step, s':>10}{'tokens/s':>12}{'targets/s':>12}{'GFLOP/s':>10}{'of matmul':>11}{'matmul GFLOP/s':>16}"
    )
    for number, (case, each) in enumerate(zip(cases, lengths, strict=True)):
        timed = slice(WARM_UP, WARM_UP + BLOCKS * steps[number])
        tokens, targets = sum(each.tokens[timed]), sum(each.targets[timed])
        # FLOPs of the first step, by its tokens
        flops_per_s = runs[number].flops * tokens / each.tokens[0] / seconds[number]
        print(
            f"{case.name:14}{seconds[number] / BLOCKS / steps[number]:>10.3f}{tokens / seconds[number]:>12,.0f}"
            f"{targets / seconds[number]:>12,.0f}{flops_per_s / 1e9:>10,.1f}{flops_per_s / rates[number]:>11.0%}"
            f"{rates[number] / 1e9:>16,.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
