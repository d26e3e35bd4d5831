"""Where a step's time goes, by group of operators: finch's recipe without its two largest gains in turn, and torchtune's stock recipe.

    python -m benchmarks.profile --data DATA [--model stories260k|smollm2] [--model-dir SMOLLM2] [--steps N]

torch.profiler's own time of each operator on the CPU, milliseconds a step, 16 TOFU rows. Profiling slows a step down; the last line is a
step without it.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.operators import GROUPS
from benchmarks.speed.paired import Contender, num_cores, start_all
from benchmarks.speed.settings import ROWS, settings_of

# Title, contender, what is changed.
COLUMNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("finch", "finch", {}),
    ("logits recomputed", "finch", {"logits_chunks": 8}),
    ("padded", "finch_padded", {}),
    ("stock recipe", "torchtune_single_device", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tofu/ and stories260k/")
    parser.add_argument("--model", choices=sorted(ROWS), default="stories260k")
    parser.add_argument("--model-dir", type=Path, help="SmolLM2-135M-Instruct's Hugging Face folder")
    parser.add_argument("--steps", type=int, default=2, help="profiled, and as many without profiling")
    args = parser.parse_args()
    if args.model == "smollm2" and args.model_dir is None:
        parser.error("--model smollm2 needs --model-dir")
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args.model, args.data, args.model_dir, Path(folder))
        contenders = [
            Contender(name, {**settings, **changes, "out": f"{folder}/{number}"}, Path(folder) / f"{number}.log")
            for number, (_, name, changes) in enumerate(COLUMNS)
        ]
        start_all(contenders)
        for one in contenders:
            one.run(1)
        profiled = [one.run(args.steps, is_profiled=True)["groups_s"] for one in contenders]
        seconds = [one.run(args.steps)["wall_s"] for one in contenders]
        for one in contenders:
            one.close()
    print(f"{args.model}, 16 TOFU rows a step; torch {torch.__version__}, {num_cores()} cores, {platform.machine()}")
    print(f"{'ms a step':28}" + "".join(f"{title:>20}" for title, *_ in COLUMNS))
    for group in GROUPS:
        _print_line(group, [each[group] / args.steps for each in profiled])
    _print_line("all operators", [sum(each.values()) / args.steps for each in profiled])
    _print_line("step, not profiled", [each / args.steps for each in seconds])


def _print_line(title: str, seconds: list[float]) -> None:
    print(f"{title:28}" + "".join(f"{1000 * each:>20,.1f}" for each in seconds))


if __name__ == "__main__":
    main()
