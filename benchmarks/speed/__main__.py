"""finch's recipe against other ways to take the same optimizer steps: 16 TOFU rows, AdamW, fp32, gradients clipped to 1.

    python -m benchmarks.speed --data DATA [--model stories260k|smollm2] [--quick]

Each contender trains in a separate process, those on 2 ranks in two. They alternate in blocks of a few steps, so that whatever else the
machine does meets all of them. A step has the same rows with all but TRL, whose steps have rows of like length. "time per target" is a
contender's over that of finch on the same number of ranks, with a 95% bootstrap interval over blocks.

"of matmul" is the rate of the needed FLOPs over the rate of matrix products at the model's shapes, measured in the same run. Needed are
those without padding, with logits at targets only and nothing recomputed, a prefix that the rows share counted once: what finch's own
step computes, counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import machine
from benchmarks.speed.blocks import Case, print_table
from benchmarks.speed.contenders import (
    BATCH,
    CONTENDERS,
    ROWS,
    Lengths,
    arguments_parser,
    group_by_length,
    samples_of,
    settings_of,
)

# The first of each is what the others are compared with. Each list alternates separately, so that all of it fits into memory.
GROUPS = (
    ("finch", "finch_constant", "finch_padded"),
    ("finch", "torchtune_single_device", "authors_loop"),
    ("finch", "transformers_trainer", "trl_sft"),
    ("finch_2_ranks", "torchtune_distributed"),
)
RANKS = {"finch_2_ranks": 2, "torchtune_distributed": 2}


# Steps of a block, blocks of each contender, and seconds after which no further round of blocks begins, in each group of contenders
QUICK = {"stories260k": (5, 24, 100), "smollm2": (1, 5, 105)}
FULL = {"stories260k": (10, 45, 600), "smollm2": (1, 15, 900)}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks, within 8 minutes")
    parser.add_argument("--model", choices=sorted(ROWS), default="stories260k")
    options = parser.parse_args()
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print("trl_sft is left out: trl is not installed", file=sys.stderr)
    steps, blocks, seconds = (QUICK if options.quick else FULL)[options.model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(options.model, options, folder)
        samples = samples_of(settings)
        lengths = dict.fromkeys(CONTENDERS, Lengths.of(samples, BATCH))
        lengths["trl_sft"] = Lengths.of(group_by_length(samples, BATCH), BATCH)
        print(f"{options.model}, {BATCH} rows per step; {machine()}")
        for group in GROUPS:
            cases = [
                Case(each, CONTENDERS[each], settings, lengths[each], ranks=RANKS.get(each, 1))
                for each in group
                if has_trl or each != "trl_sft"
            ]
            title = f"{group[0]} against {', '.join(group[1:])}"
            print_table(title, cases, folder, blocks, steps, seconds)


if __name__ == "__main__":
    main()
