"""Kills a two-rank job at random instants, resumes it until it ends, and compares it with an undisturbed run.

    python -m benchmarks.survival [--runs 50] [--seed 0]
    python -m benchmarks.survival kills [--case NAME] [--runs 50] [--seed 0]
    python -m benchmarks.survival full-disk
    python -m benchmarks.survival crash-replay [--case NAME] [--resumed 100] [--seed 0]

The second one kills averages, evaluations, sweeps and unslowed runs (:mod:`benchmarks.survival.killed_command`), the third one fills the
disk at each file of an export (:mod:`benchmarks.survival.full_disk`), the fourth one replays what a power cut can leave
(:mod:`benchmarks.survival.crash_replay`). The jobs, the kills and what counts as surviving: docs/survival.md. Everything is
written to out/BENCHMARK, which is removed first; the folders of the first one's runs that survive are removed again. ``--first N --runs 1`` with the
same seed repeats only run N of the first two.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks import tiny_job, tiny_text
from benchmarks.processes import machine
from benchmarks.survival import crash_replay, full_disk, killed_command
from benchmarks.survival.cases import CASES
from benchmarks.survival.killed_run import (
    KINDS,
    MAX_KILLS,
    MAX_TRIES,
    RECIPE,
    Job,
    Outcome,
    Timing,
    run_killed,
    run_undisturbed,
)
from benchmarks.survival.same_run import differences
from finch.base.errors import report_user_errors
from finch.checkpoint.reader import latest_valid, list_checkpoints
from finch.distributed.parallel import Parallel

EVERY_N_STEPS = 4
ROWS = 46  # 12 steps of 4 per epoch, the last one short
BYTES = 30  # that are changed
CHECKPOINT = {"every_n_steps": EVERY_N_STEPS, "keep_last": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"checkpoint": {**CHECKPOINT, "async": False}},
    "workers": {"num_workers": 2},
    "accumulation": {"batch_size": 1, "gradient_accumulation_steps": 2},
}


class Flip(NamedTuple):
    """A changed byte of a checkpoint.

    Attributes:
        file: its name in the checkpoint's folder.
        position: of the byte, from 0.
        mask: XORed with the byte, 1 to 255.
    """

    file: str
    position: int
    mask: int

    def apply(self, folder: Path) -> None:
        """Changes the byte; a second call restores it."""
        content = bytearray((folder / self.file).read_bytes())
        content[self.position] ^= self.mask
        (folder / self.file).write_bytes(content)


def draw_flips(folder: Path, number: int, rng: random.Random) -> list[Flip]:
    """Flips in every file of the folder once, and then in files drawn by their size."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    chosen = list(range(len(files)))
    chosen += rng.choices(chosen, weights=sizes, k=max(0, number - len(files)))
    return [Flip(files[index].name, rng.randrange(sizes[index]), rng.randint(1, 255)) for index in chosen[:number]]


def is_detected(run: Path, flip: Flip) -> bool:
    """Whether a resume of ``run`` would name the file and use the checkpoint before, and use the last one again once the byte is restored.

    Args:
        run: holds two complete checkpoints.
    """
    last, earlier = list_checkpoints(run)
    one_process = Parallel(torch.device("cpu"))
    flip.apply(last)
    used, damages = latest_valid([last, earlier], one_process)
    flip.apply(last)
    is_named = len(damages) == 1 and f"{last} is damaged ({flip.file}" in damages[0]
    return used == earlier and is_named and latest_valid([last, earlier], one_process) == (last, [])


class Torture:
    """
    Args:
        out: everything is written there.
        seed: of the kills and of the flips.
    """

    def __init__(self, out: Path, seed: int) -> None:
        self._out, self._seed = out, seed
        self._undisturbed: dict[str, tuple[Path, Timing]] = {}
        out.mkdir(parents=True)
        tiny_job.make_base(out / "base")
        tiny_text.make_rows(out / "rows.jsonl", ROWS, random.Random(1))
        tiny_text.make_rows(out / "held_out.jsonl", 8, random.Random(2))

    def _job(self, variant: str, name: str, recipe: str = RECIPE) -> Job:
        """A job in a new folder below ``out``."""
        folder = self._out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changes = {"batch_size": 2, "epochs": 2, "checkpoint": CHECKPOINT, **VARIANTS[variant]}
        config = tiny_job.make_config(
            self._out / "base",
            self._out / "rows.jsonl",
            folder / "run",
            dataset_validation=tiny_job.instruct_dataset(self._out / "held_out.jsonl"),
            **changes,
        )
        config["model"]["attn_dropout"] = 0.1  # so that random states matter
        config["optimizer"]["weight_decay"] = 0.01
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return Job(folder / "config.yaml", folder / "run", recipe)

    def undisturbed(self, variant: str) -> tuple[Path, Timing]:
        """The reference run of a variant, made once, and its timing."""
        if variant not in self._undisturbed:
            job = self._job(variant, f"undisturbed_{variant}")
            self._undisturbed[variant] = (job.run, timing := run_undisturbed(job))
            print(f"undisturbed, {variant}: {timing}", flush=True)
        return self._undisturbed[variant]

    def run(self, number: int, kinds: list[str] | None = None, recipe: str = RECIPE) -> Outcome:
        """Run ``number``; seed and number decide on its variant and its kills, whose kinds may be given."""
        variant = list(VARIANTS)[number % len(VARIANTS)]
        reference, timing = self.undisturbed(variant)
        start = time.monotonic()
        rng = random.Random(f"{self._seed} {number}")
        drawn_kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=rng.randint(1, MAX_KILLS))
        # A save in the background may last until the next one is due; that one waits, and is lost as well.
        max_lost = EVERY_N_STEPS if variant == "sync" else 2 * EVERY_N_STEPS
        for _ in range(MAX_TRIES):
            job = self._job(variant, f"run_{number}", recipe)
            outcome = run_killed(job, timing, kinds or drawn_kinds, rng, max_lost)
            if outcome.kills or outcome.failures:
                break
        else:
            outcome.failures.append(f"ended {MAX_TRIES} times before its kill")
        outcome.failures = outcome.failures or differences(job.run, reference)
        kills = "; ".join(map(str, outcome.kills)) or "no kill"
        lost = " ".join(map(str, outcome.lost)) or "-"
        verdict = f"FAILED, see {job.run.parent}: {outcome.failures[0]}" if outcome.failures else "survived"
        seconds = time.monotonic() - start
        print(f"run {number:2}, {variant:12} {seconds:4.0f} s: {kills}; steps lost: {lost}; {verdict}", flush=True)
        if not outcome.failures:
            shutil.rmtree(job.run.parent)
        return outcome

    def flips(self, number: int) -> tuple[list[Flip], list[Flip]]:
        """Changes ``number`` bytes, one at a time; returns the changes, and those that were not detected."""
        run, _ = self.undisturbed("async")
        flips = draw_flips(list_checkpoints(run)[0], number, random.Random(f"{self._seed} bytes"))
        return flips, [flip for flip in flips if not is_detected(run, flip)]


def summary(outcomes: list[Outcome]) -> list[str]:
    """The lines about all runs; the last one is the verdict."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    survived = sum(not outcome.failures for outcome in outcomes)
    in_save = sum(kill.phase.startswith("save") for kill in kills)
    lost = max((steps for outcome in outcomes for steps in outcome.lost), default=0)
    return [
        f"killed: {_counts(kill.kind for kill in kills)}",
        f"while in: {_counts(kill.phase for kill in kills)}",
        f"torture: {survived} / {len(outcomes)} runs survived; {len(kills)} kills, {in_save} of them "
        f"in a save; at most {lost} steps lost, saving every {EVERY_N_STEPS}",
    ]


def _counts(values: Iterable[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(Counter(values).items()))


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "benchmark", nargs="?", choices=("torture", "kills", "full-disk", "crash-replay"), default="torture"
    )
    parser.add_argument("--resumed", type=int, default=100, metavar="N", help="crash-replay: states that are resumed")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out = Path("out", options.benchmark).resolve()
    shutil.rmtree(out, ignore_errors=True)
    print(machine(), options, flush=True)
    numbers = range(options.first, options.first + options.runs)
    if options.benchmark != "torture":
        cases = [case for case in CASES if options.case in (None, case.name)]
        if options.benchmark == "kills":
            failures = killed_command.main(out, cases, options.seed, numbers)
        elif options.benchmark == "full-disk":
            failures = full_disk.main(out)
        else:
            failures = crash_replay.main(out, cases, options.seed, options.resumed)
        print(*failures, sep="\n", flush=True)
        sys.exit(1 if failures else 0)
    torture = Torture(out, options.seed)
    outcomes = [torture.run(number) for number in numbers]
    flips, missed = torture.flips(BYTES)
    print(f"bytes changed in: {_counts(flip.file for flip in flips)}", *summary(outcomes), sep="\n")
    print(f"byte changes: {BYTES - len(missed)} / {BYTES} detected", *missed, flush=True)
    if missed or any(outcome.failures for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
