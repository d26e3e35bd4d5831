"""What saving every 20 steps costs: steps per second with it and without, in turn.

    python -m benchmarks.saving [--rounds 12] [--ranks 1 2]

The recipe trains a random Llama of 14 M parameters on the CPU in fp32, once without saves, once with saves in the background and once with
saves that training waits for. Its state, with AdamW's two moments, is three times its weights. The three alternate in blocks of 20 steps; a
block with a save begins with it. Neighbours in time are compared, so that a machine that slows down or warms up favours no mode. A round
has a block of each; its ratio is that of their steps per second. More: docs/survival.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import re
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tiny_job, tiny_text
from benchmarks.processes import machine
from benchmarks.speed.blocks import Contender, start_all
from benchmarks.speed.contenders import finch
from benchmarks.speed.rows import llama_settings
from finch.checkpoint.reader import list_checkpoints
from finch.errors import UserError, report_user_errors

SIZE = {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 384, "intermediate_dim": 1024}
GLOBAL_BATCH = 12
EVERY = 20
NEVER, ASYNC, SYNC = MODES = ("never", "async", "sync")


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    seconds: of each block, by mode; the n-th of each mode is of round n.
    save_seconds: of each save, by mode.
    state_bytes: of a checkpoint on the disk, of all ranks.
    """

    seconds: dict[str, list[float]]
    save_seconds: dict[str, list[float]]
    state_bytes: int

    def ratios(self, mode: str) -> list[float]:
        """Steps per second with saving over those without, by round."""
        return [never / saving for never, saving in zip(self.seconds[NEVER], self.seconds[mode], strict=True)]


def _train(settings: dict[str, Any], **changes: Any) -> None:
    logging.disable(logging.NOTSET)  # the log has the seconds of each save
    finch(settings, **changes)


def measure(folder: Path, ranks: int, rounds: int, every: int = EVERY, size: dict[str, int] = SIZE) -> Measurement:
    """Trains on ``ranks`` processes in each mode."""
    folder.mkdir()
    tiny_job.make_base(folder / "base", std=0.02, **size)
    tiny_text.make_rows(folder / "text", (2 + rounds) * every * GLOBAL_BATCH, random.Random(1), words=(6, 8))
    rows = [json.loads(line) for line in (folder / "text").read_text(encoding="utf-8").splitlines()]
    settings = llama_settings(folder / "base", rows, folder, folder / "base")
    train = partial(_train, batch_size=GLOBAL_BATCH // ranks)
    saves = {ASYNC: {"every_n_steps": every}, SYNC: {"every_n_steps": every, "async": False}}
    runs = {
        mode: Contender(mode, partial(train, checkpoint=saves.get(mode)), settings, folder, ranks=ranks)
        for mode in MODES
    }
    start_all([*runs.values()])
    for run in runs.values():
        run.run(every - 1)  # up to the first save
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    # Over six rounds each mode has each place, and follows each other mode, equally often.
    for order in itertools.islice(itertools.cycle(itertools.permutations(MODES)), rounds):
        for mode in order:
            seconds[mode].append(runs[mode].run(every).seconds)
    for run in runs.values():
        run.close()
    save_seconds = {
        mode: [float(each) for each in re.findall(r"saved the state of step \d+ in ([\d.]+) s", log.read_text())]
        for mode, log in ((mode, folder / f"{mode}.log") for mode in saves)
    }
    last = list_checkpoints(folder / SYNC)[0]
    return Measurement(seconds, save_seconds, sum(file.stat().st_size for file in last.iterdir()))


def report(ranks: int, every: int, measured: Measurement) -> list[str]:
    """The lines to print."""
    never = measured.seconds[NEVER]
    lines = [
        f"{ranks} process{'es' if ranks > 1 else ''}, {len(never)} rounds; without saving a median of "
        f"{every / statistics.median(never):.2f} steps/s; state {measured.state_bytes / 1e6:.0f} MB"
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
            measured = measure(Path(folder) / str(ranks), ranks, options.rounds)
            print(*report(ranks, EVERY, measured), sep="\n", flush=True)


if __name__ == "__main__":
    main()
