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
from typing import Any

from benchmarks.processes import machine
from benchmarks.speed.blocks import Case, print_table
from benchmarks.speed.contenders import BATCH, Lengths, arguments_parser, finch, llama_settings, samples_of, settings_of
from benchmarks.tiny_job import make_llama

RANKS, ROWS_PER_RANK = (1, 2, 4), 8
LENGTHS, TOKENS_PER_STEP = (128, 512, 1024, 2048), 4096
MAX_STEPS = 50  # of a length
BLOCKS = 4
# Between stories260k and SmolLM2 in size, for stories260k's tokenizer
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 1088,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def _case(name: str, settings: dict[str, Any], rows: int = BATCH, ranks: int = 1, threads: int | None = None) -> Case:
    """A run of the recipe; ``rows`` of a rank's step."""
    lengths = Lengths.of(samples_of(settings), ranks * rows)
    return Case(name, partial(finch, batch_size=rows), settings, lengths, ranks, threads)


def main() -> None:
    options = arguments_parser(__doc__).parse_args()
    print(f"{machine()}, fp32")
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), options.data / "stories260k"
        llama = folder / "llama"
        make_llama(llama, **SIZES, max_position_embeddings=max(LENGTHS))
        small = settings_of("stories260k", options, folder / "small")
        questions = list(map(json.loads, (folder / "small" / "rows.jsonl").read_text(encoding="utf-8").splitlines()))
        middle = llama_settings(llama, questions, folder / "middle", tokenizer)
        for title, settings in (("0.3 M", small), ("14 M", middle)):
            cases = [_case(f"{ranks} rank(s)", settings, ROWS_PER_RANK, ranks, threads=1) for ranks in RANKS]
            title = f"{title} parameters, {ROWS_PER_RANK} TOFU rows per rank, one thread each"
            print_table(title, cases, folder, BLOCKS)
        cases = []
        for length in LENGTHS:
            answers = " ".join(row["answer"] for row in questions[: 2 + length // 20])
            number = TOKENS_PER_STEP // length
            rows = [{"question": row["question"], "answer": answers} for row in questions[: MAX_STEPS * number]]
            settings = llama_settings(llama, rows, folder / str(length), tokenizer)
            settings["config"]["tokenizer"]["max_seq_len"] = length
            cases.append(_case(f"{length} tokens", settings, number))
        print_table(f"14 M parameters, {TOKENS_PER_STEP:,} tokens per step, all cores", cases, folder, BLOCKS)
        cases = [_case("0.3 M", small), _case("14 M", middle)]
        if options.model_dir is not None:
            cases.append(_case("135 M", settings_of("smollm2", options, folder / "large")))
        print_table(f"{BATCH} TOFU rows per step, all cores", cases, folder, BLOCKS)


if __name__ == "__main__":
    main()
