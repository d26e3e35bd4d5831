"""What saving every 20 steps costs: steps per second with it and without, in turn within one run.

    python -m benchmarks.saving [--rounds 12] [--ranks 1 2]

The recipe trains a random Llama of 14 M parameters on the CPU in fp32. Its state, with AdamW's two moments, is three times its weights.
Stretches of 20 steps without a save, with one in the background and with one that training waits for alternate. A stretch with a save
begins with it and ends after it. Neighbours in time are compared, so that a machine that slows down or warms up favours no mode. The
first stretch is warm-up. A round has one of each; its ratio is that of their steps per second. More: docs/survival.md.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks import tiny_job, tiny_text
from benchmarks.processes import Ranks, machine
from finch.checkpoint.reader import list_checkpoints
from finch.checkpoint.writer import CheckpointWriter
from finch.errors import UserError, report_user_errors
from finch.training import checkpointer

SIZE = {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 384, "intermediate_dim": 1024}
GLOBAL_BATCH = 12
EVERY = 20
NEVER, ASYNC, SYNC = MODES = ("never", "async", "sync")


class AlternatingWriter(CheckpointWriter):
    """Saves never, in the background, and while training waits, in turn.

    Attributes:
        stretches: mode and seconds of each.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Each round has every mode once; over six rounds each mode has each place, and follows each other mode, equally often.
        self._modes = itertools.chain.from_iterable(itertools.cycle(itertools.permutations(MODES)))
        self._mode: str | None = None
        self._start = 0.0
        self.stretches: list[tuple[str, float]] = []

    def is_due(self, step: int) -> bool:
        if not super().is_due(step):
            return False
        self.finish()
        now = time.perf_counter()
        if self._mode is not None:
            self.stretches.append((self._mode, now - self._start))
        self._mode, self._start = next(self._modes), now
        self._asynchronous = self._mode == ASYNC
        return self._mode != NEVER


def _train(connection: Connection, config: str) -> None:
    from finch_full_finetune import recipe_main

    writers = []

    def build(*args: Any, **kwargs: Any) -> AlternatingWriter:
        writers.append(AlternatingWriter(*args, **kwargs))
        return writers[-1]

    arguments = mock.patch.object(sys, "argv", ["finch_full_finetune", "--config", config])
    with mock.patch.object(checkpointer, "CheckpointWriter", build), arguments:
        recipe_main()
    connection.send(writers[0].stretches)


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


def measure(folder: Path, ranks: int, rounds: int, every: int = EVERY, size: dict[str, int] = SIZE) -> Measurement:
    """Trains once, on ``ranks`` processes."""
    base, rows, run, config, log = (folder / name for name in ("base", "rows.jsonl", "run", "config.yaml", "run.log"))
    if not base.exists():
        tiny_job.make_base(base, std=0.02, **size)
    tiny_text.make_rows(rows, (1 + len(MODES) * rounds) * every * GLOBAL_BATCH, random.Random(1), words=(6, 8))
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
    log.unlink(missing_ok=True)
    processes = Ranks(_train, str(config), log=log, ranks=ranks)
    stretches = processes.receive()[0]
    processes.close()
    seconds = {mode: [taken for its, taken in stretches if its == mode] for mode in MODES}
    save_seconds: dict[str, list[float]] = {ASYNC: [], SYNC: []}
    for step, taken in re.findall(r"saved the state of step (\d+) in ([\d.]+) s", log.read_text()):
        stretch = int(step) // every - 1  # the save at a stretch's beginning, after the warm-up
        if stretch < len(stretches) and int(step) % every == 0:
            save_seconds[stretches[stretch][0]].append(float(taken))
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
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="at least 2; best a multiple of 6")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    options = parser.parse_args()
    if options.rounds < 2:
        raise UserError(f"--rounds={options.rounds} gives no quartiles; give 2 or more")
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            print(*report(ranks, EVERY, measure(Path(folder), ranks, options.rounds)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
