"""Kills a two-process job at random instants, resumes it until it is done, and compares it with the undisturbed run.

    python -m benchmarks.survival [--runs 50] [--seed 0] [--out out/torture]

The job trains a random Llama of two layers for 24 steps on two ranks, with dropout, and saves every 4 steps, in the background or
not, with loader workers or accumulation. Its steps and saves are slowed, so that kills land in saves. A run is killed one to three
times, most often the whole process tree at once, at instants drawn at random over its start and over its training; then it is
let come to its end. It survives if every weight of every epoch and every line of metrics.jsonl is bit for bit the undisturbed
run's, no file is left over, no process outlives a kill, and no start goes back further than the saves allow.

Then single bytes of a finished run's last checkpoint are changed, one at a time, and each change has to be found; some of them by a
whole start, which has to go on from the checkpoint before and end as the undisturbed run.

The folders of runs that survive are removed. ``--first N --runs 1`` with the same seed repeats run N alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import finch
from benchmarks import tiny_job, tiny_text
from benchmarks.survival import byte_flips
from benchmarks.survival.killed_run import KINDS, RECIPE, Job, Outcome, Timing, run_killed, run_undisturbed
from benchmarks.survival.same_run import differences
from finch.checkpoint.reader import list_checkpoints
from finch.errors import UserError, report_user_errors

EVERY_N_STEPS = 4
ROWS = 46  # 12 steps of 4 an epoch, the last one short
EPOCHS = 2
MOST_KILLS = 3
MOST_TRIES = 5  # a machine that has become faster may end a run before its kill
VARIANTS: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"async": False},
    "workers": {"num_workers": 2},
    "accumulation": {"batch_size": 1, "gradient_accumulation_steps": 2},
}
WHOLE_STARTS = 2


class Torture:
    """
    Args:
        out: everything is written there.
        seed: of the kills and of the bytes.
    """

    def __init__(self, out: Path, seed: int) -> None:
        self._out, self._seed = out, seed
        self._undisturbed: dict[str, tuple[Path, Timing]] = {}
        out.mkdir(parents=True)
        tiny_job.make_base(out / "base")
        tiny_text.make_rows(out / "rows.jsonl", ROWS, random.Random(1))
        tiny_text.make_rows(out / "held_out.jsonl", 8, random.Random(2))

    def job(self, variant: str, name: str, recipe: str = RECIPE) -> Job:
        """A job of its own folder below ``out``."""
        folder = self._out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changes = dict(VARIANTS[variant])
        checkpoint = {"every_n_steps": EVERY_N_STEPS, "keep_last": 2, "async": changes.pop("async", True)}
        tiny_job.write_config(
            folder / "config.yaml",
            base=self._out / "base",
            rows=self._out / "rows.jsonl",
            held_out=self._out / "held_out.jsonl",
            run=folder / "run",
            checkpoint=checkpoint,
            **{"batch_size": 2, "epochs": EPOCHS, **changes},
        )
        return Job(folder / "config.yaml", folder / "run", recipe)

    def undisturbed(self, variant: str) -> tuple[Path, Timing]:
        """The finished run that others are compared with, and what it took."""
        if variant not in self._undisturbed:
            job = self.job(variant, f"undisturbed_{variant}")
            self._undisturbed[variant] = (job.run, run_undisturbed(job))
            timing = self._undisturbed[variant][1]
            print(
                f"undisturbed, {variant}: {timing.steps} steps, {timing.start_s:.1f} s to the first and {timing.training_s:.1f} s from there",
                flush=True,
            )
        return self._undisturbed[variant]

    def run(self, number: int, kinds: list[str] | None = None, recipe: str = RECIPE) -> Outcome:
        """Run ``number``; its variant and its kills follow from the seed and the number, the kinds of kills unless given."""
        variant = list(VARIANTS)[number % len(VARIANTS)]
        reference, timing = self.undisturbed(variant)
        drawn = random.Random(f"{self._seed} {number}")
        drawn_kinds = drawn.choices(list(KINDS), weights=list(KINDS.values()), k=drawn.randint(1, MOST_KILLS))
        # A save in the background may take until the next one is due; that one then waits, and is lost as well.
        most_lost = EVERY_N_STEPS if variant == "sync" else 2 * EVERY_N_STEPS
        for _ in range(MOST_TRIES):
            job = self.job(variant, f"run_{number}", recipe)
            outcome = run_killed(job, timing, kinds or drawn_kinds, drawn, most_lost)
            if outcome.kills or outcome.failures:
                break
        else:
            outcome.failures.append(f"ended {MOST_TRIES} times before its kill")
        outcome.failures += outcome.damaged or ([] if outcome.failures else differences(job.run, reference))
        kills = "; ".join(map(str, outcome.kills)) or "no kill"
        verdict = f"FAILED, see {job.run.parent}: {outcome.failures[0]}" if outcome.failures else "survived"
        print(
            f"run {number:2}, {variant:12} {outcome.seconds:4.0f} s: {kills}; steps lost: {' '.join(map(str, outcome.lost)) or '-'}; {verdict}",
            flush=True,
        )
        if not outcome.failures:
            shutil.rmtree(job.run.parent)
        return outcome

    def flips(self, number: int, whole_starts: int) -> tuple[int, Counter[str]]:
        """Changes ``number`` bytes, one at a time; returns how many changes were found, and how many lay in each file."""
        run, _ = self.undisturbed("async")
        last = list_checkpoints(run)[0]
        flips = byte_flips.draw(last, number, random.Random(f"{self._seed} bytes"))
        found = [byte_flips.is_detected(run, flip) for flip in flips]
        for which in range(0, number, -(-number // whole_starts)) if whole_starts else ():
            found[which] = self._found_by_a_start(flips[which], f"flip_{which}") and found[which]
        for flip, is_found in zip(flips, found, strict=True):
            if not is_found:
                print(f"NOT DETECTED: {flip} in {last}", flush=True)
        return sum(found), Counter(flip.file for flip in flips)

    def _found_by_a_start(self, flip: byte_flips.Flip, name: str) -> bool:
        """Whether the recipe itself names the file, goes on from the checkpoint before, and ends as if nothing had been."""
        reference, _ = self.undisturbed("async")
        job = self.job("async", name)
        shutil.copytree(reference, job.run, symlinks=True)
        damaged, before = list_checkpoints(job.run)
        flip.apply(damaged)
        outcome = run_killed(job, self.undisturbed("async")[1], [], random.Random(0), 0)
        said = job.log(1).read_text(encoding="utf-8", errors="replace")
        is_named = f"{damaged} is damaged ({flip.file}" in said and re.search(
            rf"resumed from step \d+ of {before}\b", said
        )
        found = bool(is_named) and not outcome.failures and not differences(job.run, reference)
        print(f"started with a byte of {flip.file} changed: {'detected' if found else f'FAILED, see {job.run.parent}'}")
        if found:
            shutil.rmtree(job.run.parent)
        return found


def summary(outcomes: list[Outcome]) -> list[str]:
    """The lines about all runs, the last one the verdict."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    kinds, phases = Counter(kill.kind for kill in kills), Counter(kill.phase for kill in kills)
    survived = sum(not outcome.failures for outcome in outcomes)
    lost = [steps for outcome in outcomes for steps in outcome.lost]
    return [
        f"killed: {_counts(kinds)}",
        f"while in: {_counts(phases)}",
        f"torture: {survived} / {len(outcomes)} runs survived; {len(kills)} kills, {sum(kill.in_save for kill in kills)} of them "
        f"in a save; at most {max(lost, default=0)} steps lost, saving every {EVERY_N_STEPS}",
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items()))


@report_user_errors
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first run")
    parser.add_argument("--bytes", type=int, default=30, help="bytes that are changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/torture"), help="removed first")
    chosen = parser.parse_args(arguments)
    out, began = chosen.out.resolve(), time.monotonic()
    if out.exists() and not (out / "base").is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out} holds something else; give another folder")
    shutil.rmtree(out, ignore_errors=True)
    print(
        f"finch {finch.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on "
        f"{os.cpu_count()} cores\npython -m benchmarks.torture --runs {chosen.runs} --first {chosen.first} --bytes {chosen.bytes} --seed {chosen.seed}",
        flush=True,
    )
    torture = Torture(out, chosen.seed)
    outcomes = [torture.run(number) for number in range(chosen.first, chosen.first + chosen.runs)]
    detected, files = torture.flips(chosen.bytes, WHOLE_STARTS)
    print(
        f"{time.monotonic() - began:.0f} s in all", f"bytes changed in: {_counts(files)}", *summary(outcomes), sep="\n"
    )
    print(f"byte changes: {detected} / {chosen.bytes} detected", flush=True)
    if detected < chosen.bytes or any(outcome.failures for outcome in outcomes):
        sys.exit(1)
