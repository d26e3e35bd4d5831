"""finch's recipe against other ways to take the same optimizer steps: 16 TOFU rows, AdamW, fp32, gradients clipped to 1.

    python -m benchmarks.speed --data DATA [--model stories260k|smollm2] [--quick] [--json FILE]

Each contender trains in a process of its own. They alternate in blocks of a few steps, so that whatever else the machine does meets all of
them; a ratio is the sum of a contender's times over the sum of finch's, with a bootstrap interval over blocks. The rows and their targets
are the same; a contender shuffles them in its own order.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.contenders import BATCH, CONTENDERS, samples_of
from benchmarks.speed.matmul import matmul_rate
from benchmarks.speed.paired import Contender, ratio_interval

OURS = "finch"
# Steps of a block, and blocks of each contender: quick, and otherwise.
BLOCKS = {"stories260k": ((5, 8), (10, 20)), "smollm2": ((1, 3), (1, 8))}
COPIES = {"stories260k": 20, "smollm2": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model", choices=sorted(BLOCKS), default="stories260k")
    parser.add_argument(
        "--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder, for --model smollm2"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks, within 8 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    args = parser.parse_args()
    if args.model == "smollm2" and args.model_dir is None:
        parser.error("--model smollm2 needs --model-dir")
    names = [OURS, *(name for name in args.contenders if name != OURS)]
    if "trl_sft" in names and importlib.util.find_spec("trl") is None:
        print("trl_sft is left out: trl is not installed", file=sys.stderr)
        names.remove("trl_sft")
    steps, blocks = BLOCKS[args.model][0 if args.quick else 1]
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(args.model, args.data, args.model_dir, Path(folder))
        samples = samples_of(settings)
        targets = BATCH * sum(sum(label != -100 for label in row["labels"]) for row in samples) / len(samples)
        tokens = BATCH * sum(len(row["tokens"]) for row in samples) / len(samples)
        contenders = [
            Contender(name, {**settings, "out": f"{folder}/{name}"}, Path(folder) / f"{name}.log") for name in names
        ]
        flops = {one.name: one.run(1, count_flops=True)["flops"] for one in contenders}
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        rates = []
        for number in range(blocks):
            # The order turns, so that none always follows the same other one.
            for one in contenders[number % len(names) :] + contenders[: number % len(names)]:
                times[one.name].append(one.run(steps))
            rates.append(matmul_rate(round(tokens), settings["shapes"], 1.0))
        for one in contenders:
            one.close()
    rows = [_row(name, times, flops, targets * steps, sum(rates) / len(rates)) for name in names]
    _print(rows, args.model, steps, blocks, tokens, targets, sum(rates) / len(rates))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _settings(model: str, data: Path, model_dir: Path | None, folder: Path) -> dict[str, Any]:
    """What all contenders are given."""
    is_plain = model == "stories260k"
    base = (data / "stories260k" if is_plain else Path(str(model_dir))).resolve()
    lines = (data / "tofu" / "full.jsonl").read_text(encoding="utf-8").splitlines()[:400]
    rows = [json.loads(line) for line in lines] * COPIES[model]
    if not is_plain:
        turns = [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            for row in rows
        ]
        rows = [{"messages": each} for each in turns]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = json.loads((base / "config.json").read_text(encoding="utf-8"))
    width, middle = sizes["hidden_size"], sizes["intermediate_size"]
    kv = sizes["num_key_value_heads"] * width // sizes["num_attention_heads"]
    tokenizer: dict[str, Any] = {"_component_": "finch.models.auto_tokenizer", "path": str(base)}
    if is_plain:
        tokenizer = {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(base / "tokenizer.model"),
            "max_seq_len": 512,
            "prompt_template": None,
        }
    return {
        "folder": str(base),
        "rows": str(file),
        "out": str(folder),
        "is_plain": is_plain,
        "model": {"_component_": "finch.models.auto", "path": str(base)},
        "model_type": "LLAMA2" if is_plain else "LLAMA3_2",
        "tokenizer": tokenizer,
        "shapes": [
            (width, width),
            (width, kv),
            (width, kv),
            (width, width),
            (width, middle),
            (width, middle),
            (middle, width),
        ],
    }


def _row(
    name: str, times: dict[str, list[dict[str, Any]]], flops: dict[str, int], block_targets: float, matmul: float
) -> dict[str, Any]:
    def seconds(one: str, clock: str) -> list[float]:
        return [block[clock] for block in times[one]]

    ratio, low, high = ratio_interval(seconds(OURS, "wall_s"), seconds(name, "wall_s"))
    cpu_ratio, cpu_low, cpu_high = ratio_interval(seconds(OURS, "cpu_s"), seconds(name, "cpu_s"))
    wall = sum(seconds(name, "wall_s")) / len(times[name])
    return {
        "contender": name,
        "target_tokens_per_s": block_targets / wall,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "flops_per_step": flops[name],
        "peak_memory_bytes": max(block["peak_memory_bytes"] for block in times[name]),
        "matmul_flops_per_s": matmul,
    }


def _print(
    rows: list[dict[str, Any]], model: str, steps: int, blocks: int, tokens: float, targets: float, matmul: float
) -> None:
    print(
        f"{model}, {BATCH} rows a step, {tokens:,.0f} tokens, {targets:,.0f} of them targets; {blocks} blocks of {steps} steps; torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; matrix products {matmul / 1e9:,.1f} GFLOP/s"
    )
    print(f"{'':24}{'targets/s':>10}{'finch is faster':>26}{'by CPU time':>26}{'TFLOP/step':>12}{'peak MB':>9}")
    for row in rows:
        wall = f"{row['ratio']:.2f} x [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        cpu = f"{row['cpu_ratio']:.2f} x [{row['cpu_ratio_low']:.2f}, {row['cpu_ratio_high']:.2f}]"
        print(
            f"{row['contender']:24}{row['target_tokens_per_s']:>10,.0f}{wall:>26}{cpu:>26}{row['flops_per_step'] / 1e12:>12.4f}"
            f"{row['peak_memory_bytes'] / 1e6:>9,.0f}"
        )


if __name__ == "__main__":
    main()
