"""What saving every 20 steps costs: steps a second with it against without, in turns within one run.

    python -m benchmarks.saving [--rounds 12] [--ranks 1 2] [--every 20]

A random Llama of 14 M parameters is trained by the recipe on the CPU in fp32; its state, with AdamW's two moments, is three times
its weights. Stretches of 20 steps without a save, with one in the background and with one that training waits for follow each other in
changing order (benchmarks/saving_recipe.py); a round is one of each, and its ratio that of their rates. A save
takes a fixed time: the ratio is one of these steps. The writing thread shares cores and interpreter lock with the training; beside a
GPU the lock alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import finch
from benchmarks import tiny_job, tiny_text
from benchmarks.saving.recipe import ASYNC, FILE_NAME, MODES, NEVER, SYNC
from finch.checkpoint.reader import list_checkpoints
from finch.errors import UserError, report_user_errors

ROOT = Path(__file__).parents[2]
SIZE = {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 384, "intermediate_dim": 1024}
GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Measured:
    """Attributes:
    seconds: of each stretch, by mode; the n-th of each belong to round n.
    save_seconds: that a save took, by mode.
    state_bytes: on the disk, of all ranks.
    """

    seconds: dict[str, list[float]]
    save_seconds: dict[str, list[float]]
    state_bytes: int

    def ratios(self, mode: str) -> list[float]:
        """Steps a second with saving over those without, round by round."""
        return [never / saving for never, saving in zip(self.seconds[NEVER], self.seconds[mode], strict=True)]


def measure(folder: Path, ranks: int, rounds: int, every: int, size: dict[str, int]) -> Measured:
    """Trains once, on ``ranks`` processes.

    Raises:
        UserError: the run failed; with the end of what it said.
    """
    stretches = 1 + len(MODES) * rounds
    base, rows, run = folder / "base", folder / "rows.jsonl", folder / "run"
    if not base.exists():
        tiny_job.make_base(base, size)
    tiny_text.make_rows(rows, stretches * every * GLOBAL_BATCH, random.Random(1), words=(6, 8))
    tiny_job.write_config(
        folder / "config.yaml",
        base=base,
        rows=rows,
        run=run,
        size=size,
        batch_size=GLOBAL_BATCH // ranks,
        lr_scheduler={"_component_": "finch.FinchLR", "eta_max": 5e-4, "init": "first_batch"},
        optimizer={"_component_": "torch.optim.AdamW", "lr": 2e-4, "weight_decay": 0.01, "fused": True},
        check_dataset=False,
        overwrite=True,
        checkpoint={"every_n_steps": every},
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += ["-m", "benchmarks.saving.recipe", "--config", str(folder / "config.yaml")]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    (run / FILE_NAME).unlink(missing_ok=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise UserError("the run failed: " + " | ".join((done.stdout + done.stderr).strip().splitlines()[-5:]))
    lines = [json.loads(line) for line in (run / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    seconds = {mode: [line["seconds"] for line in lines if line["mode"] == mode] for mode in MODES}
    saves: dict[str, list[float]] = {ASYNC: [], SYNC: []}
    told = re.findall(r"saved the state of step (\d+) in ([\d.]+) s", done.stdout + done.stderr)
    for step, took in told:
        stretch = int(step) // every - 1  # the save at a stretch's beginning, after the first one's warm-up
        if stretch < len(lines) and int(step) % every == 0:
            saves[lines[stretch]["mode"]].append(float(took))
    [last] = list_checkpoints(run)
    return Measured(seconds, saves, sum(file.stat().st_size for file in last.iterdir()))


def lines_of(ranks: int, every: int, measured: Measured) -> list[str]:
    """What was measured, in words."""
    rate = every / statistics.median(measured.seconds[NEVER])
    lines = [
        f"{_processes(ranks)}, {len(measured.seconds[NEVER])} rounds; without saving a median of {rate:.2f} steps/s; state "
        f"{measured.state_bytes / 1e6:.0f} MB"
    ]
    for mode, words in ((ASYNC, "in the background"), (SYNC, "while training waits")):
        ratios = measured.ratios(mode)
        lines.append(
            f"  saving every {every} steps {words}, against never: ratio {statistics.median(ratios):.3f} "
            f"(rounds {min(ratios):.2f} to {max(ratios):.2f}; quartiles {_quartiles(ratios)}); a save takes {statistics.median(measured.save_seconds[mode]):.1f} s"
        )
    return lines


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "none"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.2f}, {high:.2f}"


def _processes(number: int) -> str:
    return f"{number} process" if number == 1 else f"{number} processes"


@report_user_errors
def main(arguments: list[str] | None = None, size: dict[str, int] = SIZE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="of three stretches each; a multiple of 6 is fairest")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    chosen = parser.parse_args(arguments)
    print(
        f"finch {finch.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on {os.cpu_count()} cores",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in chosen.ranks:
            measured = measure(Path(folder), ranks, chosen.rounds, chosen.every, size)
            print(*lines_of(ranks, chosen.every, measured), sep="\n", flush=True)
