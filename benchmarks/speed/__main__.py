"""finch's recipe against other ways to take the same optimizer steps: 16 TOFU rows, AdamW, fp32, gradients clipped to 1.

    python -m benchmarks.speed --data DATA [--model stories260k|smollm2] [--quick]

Each contender trains in a separate process, those on 2 ranks in two. They alternate in blocks of a few steps, so that whatever else the
machine does meets all of them. A step has the same rows with all but TRL, whose steps have rows of like length. A ratio is a contender's
time per target token over that of finch on the same number of ranks, with a 95% bootstrap interval over blocks.

"of matmul" is the rate of the needed FLOPs over the rate of matrix products at the model's shapes, measured in the same run. Needed are
those without padding, with logits at targets only and nothing recomputed, a prefix that the rows share counted once: what finch's own
step computes, counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.processes import machine, num_cores, print_line, rotated
from benchmarks.speed.blocks import Block, Contender, matmul_rate, ratio_interval, start_all
from benchmarks.speed.contenders import BATCH, CONTENDERS, samples_of
from benchmarks.speed.rows import Lengths, arguments_parser, group_by_length, parse_with_model, settings_of

# The first of each is what the others are compared with. Each list alternates separately, so that all of it fits into memory.
GROUPS = (
    ("finch", "finch_constant", "finch_padded"),
    ("finch", "torchtune_single_device", "authors_loop"),
    ("finch", "transformers_trainer", "trl_sft"),
    ("finch_2_ranks", "torchtune_distributed"),
)
RANKS = {"finch_2_ranks": 2, "torchtune_distributed": 2}


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        steps: of a block.
        blocks: of each contender.
        seconds: after which no further round of blocks begins, in each group of contenders; at least two are run.
    """

    steps: int
    blocks: int
    seconds: float


QUICK = {"stories260k": Plan(5, 24, 100), "smollm2": Plan(1, 5, 105)}
FULL = {"stories260k": Plan(10, 45, 600), "smollm2": Plan(1, 15, 900)}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks, within 8 minutes")
    options = parse_with_model(parser)
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print("trl_sft is left out: trl is not installed", file=sys.stderr)
    plan = (QUICK if options.quick else FULL)[options.model]
    torch.set_num_threads(num_cores())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(options.model, options.data, options.model_dir, folder)
        samples = samples_of(settings)
        lengths = dict.fromkeys(CONTENDERS, Lengths.of(samples, BATCH))
        lengths["trl_sft"] = Lengths.of(group_by_length(samples, BATCH), BATCH)
        tokens, targets = (sum(each) / len(each) for each in lengths["finch"])
        print(
            f"{options.model}, {BATCH} rows per step, {tokens:,.0f} tokens, {targets:,.0f} of them targets; "
            f"blocks of {plan.steps} steps; {machine()}"
        )
        print_line("", "targets/s", "finch is faster", "TFLOP", "of matmul", "peak MB", "blocks", width=20)
        for number, group in enumerate(GROUPS):
            names = [each for each in group if has_trl or each != "trl_sft"]
            _measure(names, plan, settings, lengths, folder / str(number))


def _measure(names: list[str], plan: Plan, settings: dict[str, Any], lengths: dict[str, Lengths], folder: Path) -> None:
    """Prints the lines of contenders that alternate; the first one is ours."""
    contenders = {name: Contender(name, CONTENDERS[name], settings, folder, ranks=RANKS.get(name, 1)) for name in names}
    first, start = names[0], time.monotonic()
    start_all([*contenders.values()])
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    rates: list[float] = []
    tokens = lengths[first].tokens
    while len(rates) < plan.blocks:
        round_start = time.monotonic()
        for name in rotated(names, len(rates)):
            blocks[name].append(contenders[name].run(plan.steps))
        rates.append(matmul_rate(round(sum(tokens) / len(tokens)), settings["shapes"]))
        if len(rates) > 1 and 2 * time.monotonic() - round_start > start + plan.seconds:
            break
    for one in contenders.values():
        one.close()

    def of_blocks(values: list[int]) -> list[int]:
        """Sums over the steps of each block; the first step is in none."""
        return [sum(values[1 + plan.steps * number :][: plan.steps]) for number in range(len(rates))]

    seconds = {name: [block.seconds for block in blocks[name]] for name in names}
    targets = {name: of_blocks(lengths[name].targets) for name in names}
    matmul = sum(rates) / len(rates)
    needed = contenders[first].flops / tokens[0] * sum(of_blocks(tokens)) / sum(targets[first])  # of a target token
    print(f"against {first}; matrix products {matmul / 1e9:,.1f} GFLOP/s")
    for name in names:
        ratio, low, high = ratio_interval(seconds[first], seconds[name], (targets[first], targets[name]))
        rate = sum(targets[name]) / sum(seconds[name])
        print_line(
            name,
            f"{rate:,.0f}",
            f"{ratio:.2f} x [{low:.2f}, {high:.2f}]",
            f"{contenders[name].flops / 1e12:.4f}",
            f"{needed * rate / matmul:.0%}",
            f"{max(block.peak_memory_bytes for block in blocks[name]) / 1e6:,.0f}",
            str(len(rates)),
            width=20,
        )


if __name__ == "__main__":
    main()
