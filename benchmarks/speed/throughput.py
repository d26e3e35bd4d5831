"""Target tokens a second of finch's recipe against torchtune's stock single-device recipe, alternating in one run.

    python -m benchmarks.speed --data DATA [--rounds 3]

Both train stories260k on the first 400 TOFU rows with the settings of configs/stories260k/tofu_finch.yaml in one process: finch
with FINCH's schedule, all its metrics and metrics.jsonl, the stock recipe with a constant learning rate and its DiskLogger. A
recipe's rate is the harmonic mean of what it logs for the steps after the first epoch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from finch.config.registry import find_config

EPOCHS = 3
STEPS_PER_EPOCH = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder that stories260k/tofu_finch takes as data_root")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each recipe, alternating")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"finch": [], "stock": []}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(args.rounds):
            # The recipes alternate in starting a round, so that a machine that warms up or slows down favours neither.
            for name in ("finch", "stock") if round_number % 2 == 0 else ("stock", "finch"):
                rates[name].append(run(name, Path(folder) / f"{name}_{round_number}", Path(args.data).resolve()))
                print(f"round {round_number + 1}, {name}: {rates[name][-1]:,.0f} target tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"median: finch {medians['finch']:,.0f}, stock {medians['stock']:,.0f} target tokens/s")
    print(f"ratio finch / stock: {medians['finch'] / medians['stock']:.3f}")


def run(name: str, folder: Path, data: Path) -> float:
    """Trains once in a subprocess; returns target tokens a second."""
    folder.mkdir()
    node = OmegaConf.merge(OmegaConf.load(find_config("stories260k/tofu_finch")), {"data_root": str(data)})
    config = cast("dict[str, Any]", OmegaConf.to_container(node, resolve=True))
    config.pop("data_root")
    config.update(output_dir=str(folder / "run"), batch_size=16, epochs=EPOCHS, device="cpu")
    logger = "torchtune.training.metric_logging.DiskLogger"
    config["metric_logger"] = {"_component_": logger, "log_dir": str(folder), "filename": "log.txt"}
    config.pop("dataset_validation")
    recipe = "finch_full_finetune"
    if name == "stock":
        recipe = "full_finetune_single_device"
        config.pop("lr_scheduler")
        config.update(optimizer_in_bwd=False, compile=False)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", recipe, "--config", str(folder / "config.yaml")]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{recipe} failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return rate(folder)


def rate(folder: Path) -> float:
    """Target tokens a second over the steps after the first epoch, from the logged rate of each step.

    The harmonic mean of the steps' rates is tokens over time, since steps hold about the same number of tokens.
    """
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if "tokens_per_second_per_gpu:" in line]
    rates = [float(line.split("tokens_per_second_per_gpu:")[1].split()[0]) for line in lines]
    return statistics.harmonic_mean(rates[STEPS_PER_EPOCH:])
