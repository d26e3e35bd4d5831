"""What saving every 20 steps costs: steps per second with it and without, in turn within one run.

    python -m benchmarks.saving [--rounds 12] [--ranks 1 2] [--every 20]

The recipe trains a random Llama of 14 M parameters on the CPU in fp32; its state, with AdamW's two moments, is three times its weights.
Stretches of 20 steps without a save, with one in the background and with one that training waits for alternate
(benchmarks/saving/recipe.py). A round has one of each; its ratio is that of their steps per second. More: docs/survival.md.
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
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

import finch
from benchmarks import tiny_job, tiny_text
from benchmarks.saving.recipe import ASYNC, FILE_NAME, MODES, NEVER, SYNC
from finch.checkpoint.reader import list_checkpoints
from finch.errors import UserError, report_user_errors

SIZE = {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 384, "intermediate_dim": 1024}
GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    seconds: of each stretch, by mode; the n-th of each mode is of round n.
    save_seconds: of each save, by mode.
    state_bytes: of a checkpoint on the disk, of all ranks.
    """

    seconds: dict[str, list[float]]
    save_seconds: dict[str, list[float]]
    state_bytes: int

    def ratios(self, mode: str) -> list[float]:
        """Steps per second with saving over those without, by round."""
        return [never / saving for never, saving in zip(self.seconds[NEVER], self.seconds[mode], strict=True)]


def measure(folder: Path, ranks: int, rounds: int, every: int, size: dict[str, int] = SIZE) -> Measurement:
    """Trains once, on ``ranks`` processes.

    Raises:
        UserError: the run failed; with the end of its output.
    """
    stretches = 1 + len(MODES) * rounds
    base, rows, run, config = folder / "base", folder / "rows.jsonl", folder / "run", folder / "config.yaml"
    if not base.exists():
        tiny_job.make_base(base, std=0.02, **size)
    tiny_text.make_rows(rows, stretches * every * GLOBAL_BATCH, random.Random(1), words=(6, 8))
    job = tiny_job.make_config(
        base,
        rows,
        run,
        batch_size=GLOBAL_BATCH // ranks,
        lr_scheduler={"_component_": "finch.FinchLR", "eta_max": 5e-4, "init": "first_batch"},
        optimizer={"_component_": "torch.optim.AdamW", "lr": 2e-4, "weight_decay": 0.01, "fused": True},
        check_dataset=False,
        overwrite=True,
        checkpoint={"every_n_steps": every},
    )
    job["model"].update(attn_dropout=0.1, **size)
    config.write_text(yaml.safe_dump(job), encoding="utf-8")
    (run / FILE_NAME).unlink(missing_ok=True)
    done = subprocess.run(
        tiny_job.torchrun(ranks, "-m", "benchmarks.saving.recipe", "--config", str(config)),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=tiny_job.environment(tiny_job.ROOT, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // ranks))),
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise UserError("the run failed: " + " | ".join(output.strip().splitlines()[-5:]))
    lines = [json.loads(line) for line in (run / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    seconds = {mode: [line["seconds"] for line in lines if line["mode"] == mode] for mode in MODES}
    save_seconds: dict[str, list[float]] = {ASYNC: [], SYNC: []}
    for step, save_s in re.findall(r"saved the state of step (\d+) in ([\d.]+) s", output):
        stretch = int(step) // every - 1  # the save at a stretch's beginning, after the warm-up
        if stretch < len(lines) and int(step) % every == 0:
            save_seconds[lines[stretch]["mode"]].append(float(save_s))
    [last] = list_checkpoints(run)
    return Measurement(seconds, save_seconds, sum(file.stat().st_size for file in last.iterdir()))


def report(ranks: int, every: int, measured: Measurement) -> list[str]:
    """The lines to print."""
    rate = every / statistics.median(measured.seconds[NEVER])
    lines = [
        f"{ranks} process{'es' if ranks > 1 else ''}, {len(measured.seconds[NEVER])} rounds; without saving a median of {rate:.2f} steps/s; "
        f"state {measured.state_bytes / 1e6:.0f} MB"
    ]
    for mode, description in ((ASYNC, "in the background"), (SYNC, "while training waits")):
        ratios, save_s = measured.ratios(mode), statistics.median(measured.save_seconds[mode])
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        lines.append(
            f"  saving every {every} steps {description}, against never: ratio {statistics.median(ratios):.3f} "
            f"(rounds {min(ratios):.2f} to {max(ratios):.2f}; quartiles {low:.2f}, {high:.2f}); a save takes {save_s:.1f} s"
        )
    return lines


@report_user_errors
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=12, help="of three stretches each, at least 2; best a multiple of 6"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        raise UserError(f"--rounds={options.rounds} gives no quartiles; give 2 or more")
    print(
        f"finch {finch.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on {os.cpu_count()} cores",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            measured = measure(Path(folder), ranks, options.rounds, options.every)
            print(*report(ranks, options.every, measured), sep="\n", flush=True)
