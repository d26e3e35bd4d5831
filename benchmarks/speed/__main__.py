"""finch's recipe against other ways to take the same optimizer steps: 16 TOFU rows, AdamW, fp32, gradients clipped to 1.

    python -m benchmarks.speed --data DATA [--model stories260k|smollm2] [--quick] [--json FILE]

Each contender trains in a separate process, those on 2 ranks in two. They alternate in blocks of a few steps, so that whatever else the
machine does meets all of them. A step has the same rows with all but TRL, whose steps have rows of like length. A ratio is a contender's
time per target token over that of finch on the same number of ranks, with a 95% bootstrap interval over blocks.

"of matmul" is the rate of the needed FLOPs over the rate of matrix products at the model's shapes, measured in the same run. Needed are
those without padding, with logits at targets only and nothing recomputed, a prefix that the rows share counted once: what finch's own
step computes, counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.processes import machine, num_cores, print_line, rotated
from benchmarks.speed.blocks import Contender, matmul_rate, ratio_interval, start_all
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
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
        rows: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(GROUPS):
            names = [each for each in group if has_trl or each != "trl_sft"]
            for row in _measure(names, plan, settings, lengths, folder / str(number)):
                _print_row(row)
                rows.setdefault(row["contender"], row)
            if options.json is not None:
                options.json.write_text(json.dumps(list(rows.values()), indent=2) + "\n", encoding="utf-8")


def _measure(
    names: list[str], plan: Plan, settings: dict[str, Any], lengths: dict[str, Lengths], folder: Path
) -> list[dict[str, Any]]:
    """The rows of contenders that alternate; the first one is ours."""
    folder.mkdir()
    contenders = {
        name: Contender(
            CONTENDERS[name], {**settings, "out": f"{folder}/{name}"}, folder / f"{name}.log", ranks=RANKS.get(name, 1)
        )
        for name in names
    }
    ours, start = lengths[names[0]].tokens, time.monotonic()
    start_all([*contenders.values()])
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rates = []
    for number in range(plan.blocks):
        round_start = time.monotonic()
        for name in rotated(names, number):
            blocks[name].append(contenders[name].run(plan.steps))
        rates.append(matmul_rate(round(sum(ours) / len(ours)), settings["shapes"]))
        if number and 2 * time.monotonic() - round_start > start + plan.seconds:
            break
    for one in contenders.values():
        one.close()

    def of_blocks(lengths: list[int]) -> list[int]:
        """Sums over the steps of each block; the first step is in none."""
        starts = [1 + plan.steps * number for number in range(len(rates))]
        return [sum(lengths[start : start + plan.steps]) for start in starts]

    seconds = {name: [block["seconds"] for block in blocks[name]] for name in names}
    targets = {name: of_blocks(lengths[name].targets) for name in names}
    matmul = sum(rates) / len(rates)
    needed = contenders[names[0]].flops / ours[0] * sum(of_blocks(ours)) / sum(targets[names[0]])
    rows = []
    for name in names:
        work = targets[names[0]], targets[name]
        ratio, low, high = ratio_interval(seconds[names[0]], seconds[name], work)
        rate = sum(targets[name]) / sum(seconds[name])
        rows.append(
            {
                "contender": name,
                "against": names[0],
                "target_tokens_per_s": rate,
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "matmul_share": needed * rate / matmul,
                "flops_of_first_step": contenders[name].flops,
                "needed_flops_per_target_token": needed,
                "peak_memory_bytes": max(block["peak_memory_bytes"] for block in blocks[name]),
                "matmul_flops_per_s": matmul,
                "step_s": sum(seconds[name]) / len(rates) / plan.steps,
                "blocks": len(rates),
            }
        )
    return rows


def _print_row(row: dict[str, Any]) -> None:
    if row["contender"] == row["against"]:
        print(f"against {row['against']}; matrix products {row['matmul_flops_per_s'] / 1e9:,.1f} GFLOP/s")
    print_line(
        row["contender"],
        f"{row['target_tokens_per_s']:,.0f}",
        f"{row['ratio']:.2f} x [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]",
        f"{row['flops_of_first_step'] / 1e12:.4f}",
        f"{row['matmul_share']:.0%}",
        f"{row['peak_memory_bytes'] / 1e6:,.0f}",
        str(row["blocks"]),
        width=20,
    )


if __name__ == "__main__":
    main()
