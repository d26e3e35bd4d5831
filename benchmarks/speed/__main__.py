"""finch's recipe against other ways to take the same optimizer steps: 16 TOFU rows, AdamW, fp32, gradients clipped to 1.

    python -m benchmarks.speed --data DATA [--model stories260k|smollm2] [--quick] [--json FILE]

Each contender trains in a process of its own, those on 2 ranks in two. They alternate in blocks of a few steps, so that whatever else the
machine does meets all of them; a step has the same rows with all but TRL, whose steps have rows of like length. A ratio is a contender's
time for a target token over that of finch on the same number of ranks, with a 95% bootstrap interval over blocks.

matmul_share is the rate of the needed FLOPs over the rate of matrix products at the model's shapes, measured in the same run. Needed are
those without padding, with logits at targets alone and nothing recomputed, a prefix that the rows share counted once: what finch's own
step computes, counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speed.contenders import BATCH, CONTENDERS, samples_of
from benchmarks.speed.matmul import matmul_rate
from benchmarks.speed.paired import Contender, num_cores, ratio_interval, start_all
from benchmarks.speed.settings import Lengths, like_lengths_together, settings_of

# The first of each is what the others are compared with. Each list alternates alone, so that all of it fits into memory.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model", choices=sorted(QUICK), default="stories260k")
    parser.add_argument(
        "--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder, for --model smollm2"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks, within 8 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    args = parser.parse_args()
    if args.model == "smollm2" and args.model_dir is None:
        parser.error("--model smollm2 needs --model-dir")
    names = list(args.contenders)
    if "trl_sft" in names and importlib.util.find_spec("trl") is None:
        print("trl_sft is left out: trl is not installed", file=sys.stderr)
        names.remove("trl_sft")
    plan = (QUICK if args.quick else FULL)[args.model]
    torch.set_num_threads(num_cores())
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args.model, args.data, args.model_dir, Path(folder))
        samples = samples_of(settings)
        lengths = {name: Lengths.of(samples, BATCH) for name in CONTENDERS}
        lengths["trl_sft"] = Lengths.of(like_lengths_together(samples, BATCH), BATCH)
        _print_title(args.model, plan, lengths["finch"])
        rows: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(GROUPS):
            chosen = [group[0], *(name for name in group[1:] if name in names)]
            if len(chosen) == 1 and names != chosen:
                continue
            (own := Path(folder) / str(number)).mkdir()
            measured = _measure(chosen, plan, settings, lengths, own)
            _print_rows(measured)
            rows |= {row["contender"]: row for row in measured if row["contender"] not in rows}
            if args.json is not None:
                args.json.write_text(json.dumps(list(rows.values()), indent=2) + "\n", encoding="utf-8")


def _measure(
    names: list[str], plan: Plan, settings: dict[str, Any], lengths: dict[str, Lengths], folder: Path
) -> list[dict[str, Any]]:
    """The rows of contenders that alternate; the first one is ours."""
    contenders = [
        Contender(name, {**settings, "out": f"{folder}/{name}"}, folder / f"{name}.log", ranks=RANKS.get(name, 1))
        for name in names
    ]
    start = time.monotonic()
    start_all(contenders)
    flops = {one.name: one.flops for one in contenders}
    tokens_of_a_step = round(sum(lengths[names[0]].tokens) / len(lengths[names[0]].tokens))
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rates = []
    for number in range(plan.blocks):
        round_start = time.monotonic()
        # The order turns, so that none always follows the same other one.
        for one in contenders[number % len(names) :] + contenders[: number % len(names)]:
            times[one.name].append(one.run(plan.steps))
        rates.append(matmul_rate(tokens_of_a_step, settings["shapes"], 0.5))
        if number and 2 * time.monotonic() - round_start > start + plan.seconds:
            break
    for one in contenders:
        one.close()
    starts = [1 + plan.steps * number for number in range(len(rates))]  # the first step is the warm-up
    targets = {
        name: [sum(each.targets[start : start + plan.steps]) for start in starts] for name, each in lengths.items()
    }
    ours = lengths[names[0]].tokens
    needed_per_token = flops[names[0]] / ours[0]
    tokens = sum(sum(ours[start : start + plan.steps]) for start in starts)
    needed_per_target = needed_per_token * tokens / sum(targets[names[0]])
    return [
        _row(name, names[0], times, targets, plan.steps, flops[name], needed_per_target, sum(rates) / len(rates))
        for name in names
    ]


def _row(
    name: str,
    ours: str,
    times: dict[str, list[dict[str, Any]]],
    targets: dict[str, list[int]],
    steps: int,
    flops: int,
    needed_flops: float,
    matmul: float,
) -> dict[str, Any]:
    """A row of the result.

    Args:
        times: of each block, by contender.
        targets: target tokens of each block, by contender.
        steps: of a block.
        flops: of the contender's first step.
        needed_flops: for a target token.
        matmul: rate of matrix products, FLOP/s.
    """

    def seconds(one: str, clock: str) -> list[float]:
        return [block[clock] for block in times[one]]

    work = targets[ours], targets[name]
    ratio, low, high = ratio_interval(seconds(ours, "wall_s"), seconds(name, "wall_s"), work)
    cpu_ratio, cpu_low, cpu_high = ratio_interval(seconds(ours, "cpu_s"), seconds(name, "cpu_s"), work)
    wall = sum(seconds(name, "wall_s"))
    rate = sum(targets[name]) / wall
    return {
        "contender": name,
        "against": ours,
        "target_tokens_per_s": rate,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "matmul_share": needed_flops * rate / matmul,
        "flops_of_first_step": flops,
        "needed_flops_per_target_token": needed_flops,
        "peak_memory_bytes": max(block["peak_memory_bytes"] for block in times[name]),
        "matmul_flops_per_s": matmul,
        "step_s": wall / len(times[name]) / steps,
        "blocks": len(times[name]),
    }


def _print_title(model: str, plan: Plan, lengths: Lengths) -> None:
    tokens, targets = (sum(each) / len(each) for each in lengths)
    print(
        f"{model}, {BATCH} rows a step, {tokens:,.0f} tokens, {targets:,.0f} of them targets; blocks of {plan.steps} steps; "
        f"torch {torch.__version__}, {num_cores()} cores, {platform.machine()}"
    )
    print(
        f"{'':24}{'targets/s':>10}{'finch is faster':>22}{'by CPU time':>22}{'TFLOP':>10}{'of matmul':>11}{'peak MB':>9}{'blocks':>8}",
        flush=True,
    )


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"against {rows[0]['against']}; matrix products {rows[0]['matmul_flops_per_s'] / 1e9:,.1f} GFLOP/s")
    for row in rows:
        wall = f"{row['ratio']:.2f} x [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        cpu = f"{row['cpu_ratio']:.2f} x [{row['cpu_ratio_low']:.2f}, {row['cpu_ratio_high']:.2f}]"
        print(
            f"{row['contender']:24}{row['target_tokens_per_s']:>10,.0f}{wall:>22}{cpu:>22}{row['flops_of_first_step'] / 1e12:>10.4f}"
            f"{row['matmul_share']:>11.0%}{row['peak_memory_bytes'] / 1e6:>9,.0f}{row['blocks']:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
