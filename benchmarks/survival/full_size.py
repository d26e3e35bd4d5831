"""Saves at full size on this GPU: what they cost the steps, and a run that is killed while it saves, and resumed.

    python -m benchmarks.survival.full_size [--device cpu] [--out FOLDER]

Needs no weights and no network: the shipped config of Qwen3-4B with random weights, 12 steps, a save every third one. A smaller Qwen3 is
taken where 4B does not fit the GPU or the disk, and the page says so; a tiny model on the CPU. The page is that of `finch doctor --gpu`,
full_size.json and full_size.md.
"""

from __future__ import annotations

import argparse
import operator
import os
import re
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.gpu import choose_model
from benchmarks.tiny_job import ROOT, environment
from finch.plan.gpu_check.models import Model, draw_weights, write_base
from finch.plan.gpu_check.phases import Phase, run_phases
from finch.plan.gpu_check.processes import Ranks
from finch.plan.gpu_check.report import Check
from finch.plan.gpu_check.runs import KillAfter, compare_losses, job, losses_of

PHASE = Phase("saves at full size", "benchmarks.survival.full_size:run", 480, 0)
_EVERY, _KILLED_AFTER = 3, 8
_DISK = 8  # times the weights: the pretrained folder, two checkpoints with AdamW's moments, an export
_LIMIT = 1e-2  # of losses in bf16: attention adds in no fixed order in its backward
_SAVED = re.compile(r"saved the state of step (\d+) in ([\d.]+) s")


class Clock(KillAfter):
    """Writes into ``file`` when each step has ended; ends the process after ``step``, 0: never."""

    def __init__(self, file: str, step: int) -> None:
        super().__init__(step)
        self._file = file

    def after_step(self, state: Any) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            print(time.time(), file=file)
        super().after_step(state)


def run(check: Check) -> None:
    """The phase: a run without saves, one that is killed soon after a save has begun, and the rest of that one."""
    dtype = "fp32" if check.device == "cpu" else "bf16"
    model = choose_model(check, dtype, _DISK)
    if model is None:
        return
    start = time.time()
    write_base(check.folder, model, draw_weights(model, check.device, torch.bfloat16))
    check.measured("seconds to write the pretrained folder", time.time() - start)
    with check.case("a run without saves"):
        ends = _train(check, "straight", model, dtype)
        losses = losses_of(check.folder / "straight")
        shutil.rmtree(check.folder / "straight")
        check.measured("seconds per step without saves", statistics.median(map(operator.sub, ends[1:], ends)))
    saves: dict[str, Any] = {"checkpoint": {"every_n_steps": _EVERY}}
    with check.case("a run that is killed"):
        ends = _train(check, "killed", model, dtype, killed_after=_KILLED_AFTER, **saves)
        check.measured("seconds of the longest step with saves", max(map(operator.sub, ends[1:], ends)))
    with check.case("the rest of it"):
        start = time.time()
        ends = _train(check, "killed", model, dtype, resume_from_checkpoint=True, **saves)
        first = len(losses) - len(ends) + 1
        check.measured("seconds from the start to the end of the first resumed step", ends[0] - start)
        check.equal(f"resumed after a save of every {_EVERY} steps", (first - 1) % _EVERY, 0, note=f"at step {first}")
        seen = losses_of(check.folder / "killed")
        compare_losses(check, "the killed and resumed run against the one without saves", seen, losses, _LIMIT)
    for log in sorted(check.folder.glob("killed*.log")):
        for step, seconds in _SAVED.findall(log.read_text(encoding="utf-8", errors="replace")):
            check.measured(f"{log.stem}: seconds to save step {step}", float(seconds))


def _train(check: Check, name: str, model: Model, dtype: str, killed_after: int = 0, **changes: Any) -> list[float]:
    """Starts the run ``name`` in a process; returns when each step has ended, by ``time.time()``."""
    clock = check.folder / f"{name}_{killed_after}.clock"
    hook = {"_component_": f"{__name__}.Clock", "file": str(clock), "step": killed_after}
    options = {"checkpoint": None, "hooks": {"clock": hook}, "log_level": "INFO", "save_last_epoch_only": True}
    config = job(check, name, model=model, **{**options, "dtype": dtype, **changes})
    running = Ranks(clock.stem, "finch.plan.gpu_check.runs:train", {"config": config}, check.folder)
    running.finish(check.end)
    if running.codes != [-signal.SIGKILL if killed_after else 0]:
        raise RuntimeError(running.last_lines())
    return [*map(float, clock.read_text(encoding="utf-8").split())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for full_size.json and .md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(ROOT, ROOT / "recipes")
    is_done = run_phases(options.out / "full_size", device=options.device, ranks=1, quick=False, phases=[PHASE])
    sys.exit(not is_done)


if __name__ == "__main__":
    main()
