"""What saving every 20 steps costs: steps per second with it and without, in turn.

    python -m benchmarks.saving [--rounds 12]

The recipe trains a random Llama of 14 M parameters on the CPU in fp32, once without saves, once with saves in the background and once with
saves that training waits for. Its state, with AdamW's two moments, is three times its weights. The three alternate in blocks of 20 steps; a
block with a save begins with it, and the next save waits for one that lasts longer than its block. Neighbours in time are compared, so that
a machine that slows down or warms up favours no mode. A round has a block of each; its ratio is that of their steps per second. More:
docs/survival.md.
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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tiny_job, tiny_text
from benchmarks.processes import machine, print_rows, spread
from benchmarks.speed.blocks import Contender
from benchmarks.speed.contenders import finch, llama_settings
from finch.checkpoint.reader import list_checkpoints

SIZE = {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 384, "intermediate_dim": 1024}
GLOBAL_BATCH = 12
EVERY = 20
NEVER, WAITING = "never", "while training waits"
MODES: dict[str, dict[str, Any] | None] = {
    NEVER: None,
    "in the background": {"every_n_steps": EVERY},
    WAITING: {"every_n_steps": EVERY, "async": False},
}


def _train(settings: dict[str, Any], **changes: Any) -> None:
    logging.disable(logging.NOTSET)  # the log has the seconds of each save
    finch(settings, **changes)


def measure(folder: Path, ranks: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Trains on ``ranks`` processes in each mode.

    Returns:
        Seconds of each block by mode, the n-th of each mode in round n; seconds of each save by mode; bytes of a checkpoint on the disk.
    """
    folder.mkdir()
    tiny_job.make_base(folder / "base", std=0.02, **SIZE)
    tiny_text.make_rows(folder / "text", (2 + rounds) * EVERY * GLOBAL_BATCH, random.Random(1), words=(6, 8))
    rows = list(map(json.loads, (folder / "text").read_text(encoding="utf-8").splitlines()))
    settings = llama_settings(folder / "base", rows, folder, folder / "base")
    runs = {}
    for mode, saves in MODES.items():
        program = partial(_train, batch_size=GLOBAL_BATCH // ranks, checkpoint=saves)
        runs[mode] = Contender(mode, program, settings, folder, ranks=ranks)
        runs[mode].run(EVERY - 1)  # up to the first save
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    # Over six rounds each mode has each place, and follows each other mode, equally often.
    for order in itertools.islice(itertools.cycle(itertools.permutations(MODES)), rounds):
        for mode in order:
            seconds[mode].append(runs[mode].run(EVERY).seconds)
    for run in runs.values():
        run.close()
    saved = re.compile(r"saved the state of step \d+ in ([\d.]+) s")
    logs = {mode: (folder / f"{mode}.log").read_text(encoding="utf-8") for mode in MODES}
    last = list_checkpoints(folder / WAITING)[0]
    size = sum(file.stat().st_size for file in last.iterdir())
    return seconds, {mode: [*map(float, saved.findall(log))] for mode, log in logs.items()}, size


def row_of(mode: str, seconds: dict[str, list[float]], save_seconds: list[float]) -> dict[str, Any]:
    """A mode's line; the ratio is that of steps per second to those without saves, in each round."""
    ratios = [never / saving for never, saving in zip(seconds[NEVER], seconds[mode], strict=True)]
    a_save = f"{statistics.median(save_seconds):.1f}" if save_seconds else ""
    rate = EVERY / statistics.median(seconds[mode])
    return {"saves": mode, "steps/s": rate, "ratio, median (range)": spread(ratios), "a save, s": a_save}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="best a multiple of 6")
    rounds = parser.parse_args().rounds
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            seconds, save_seconds, size = measure(Path(folder) / str(ranks), ranks, rounds)
            print(f"\n{ranks} process(es), {rounds} rounds, a save every {EVERY} steps, state {size / 1e6:.0f} MB")
            print_rows([row_of(mode, seconds, save_seconds[mode]) for mode in MODES])


if __name__ == "__main__":
    main()
