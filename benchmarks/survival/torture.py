"""Kills a two-rank job at random instants, resumes it until it ends, and compares it with an undisturbed run.

    python -m benchmarks.survival [--runs 50] [--seed 0] [--out out/torture]

The job, the kills and what counts as surviving: docs/survival.md. The folders of runs that survive are removed. ``--first N --runs 1``
with the same seed repeats run N alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml

import finch
from benchmarks import tiny_job, tiny_text
from benchmarks.survival import byte_flips
from benchmarks.survival.killed_run import KINDS, RECIPE, Job, Outcome, Timing, run_killed, run_undisturbed
from benchmarks.survival.same_run import differences
from finch.checkpoint.reader import list_checkpoints
from finch.errors import UserError, report_user_errors

EVERY_N_STEPS = 4
ROWS = 46  # 12 steps of 4 per epoch, the last one short
MAX_KILLS = 3
MAX_TRIES = 5  # on a machine that has become faster a run may end before its kill
FULL_STARTS = 2  # flips that are detected by a start on two ranks as well
VARIANTS: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"async": False},
    "workers": {"num_workers": 2},
    "accumulation": {"batch_size": 1, "gradient_accumulation_steps": 2},
}


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

    def job(self, variant: str, name: str, recipe: str = RECIPE) -> Job:
        """A job with its own folder below ``out``."""
        folder = self._out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changes = {"batch_size": 2, "epochs": 2, **VARIANTS[variant]}
        checkpoint = {"every_n_steps": EVERY_N_STEPS, "keep_last": 2, "async": changes.pop("async", True)}
        config = tiny_job.make_config(
            self._out / "base",
            self._out / "rows.jsonl",
            folder / "run",
            dataset_validation=tiny_job.instruct_dataset(self._out / "held_out.jsonl"),
            checkpoint=checkpoint,
            **changes,
        )
        config["model"]["attn_dropout"] = 0.1  # so that random states matter
        config["optimizer"]["weight_decay"] = 0.01
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return Job(folder / "config.yaml", folder / "run", recipe)

    def undisturbed(self, variant: str) -> tuple[Path, Timing]:
        """The reference run of a variant, made once, and its timing."""
        if variant not in self._undisturbed:
            job = self.job(variant, f"undisturbed_{variant}")
            self._undisturbed[variant] = (job.run, timing := run_undisturbed(job))
            print(
                f"undisturbed, {variant}: {timing.steps} steps, {timing.start_s:.1f} s to the first and {timing.training_s:.1f} s from there",
                flush=True,
            )
        return self._undisturbed[variant]

    def run(self, number: int, kinds: list[str] | None = None, recipe: str = RECIPE) -> Outcome:
        """Run ``number``; seed and number decide on its variant and its kills, whose kinds may be given."""
        variant = list(VARIANTS)[number % len(VARIANTS)]
        reference, timing = self.undisturbed(variant)
        rng = random.Random(f"{self._seed} {number}")
        drawn_kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=rng.randint(1, MAX_KILLS))
        # A save in the background may last until the next one is due; that one waits, and is lost as well.
        max_lost = EVERY_N_STEPS if variant == "sync" else 2 * EVERY_N_STEPS
        for _ in range(MAX_TRIES):
            job = self.job(variant, f"run_{number}", recipe)
            outcome = run_killed(job, timing, kinds or drawn_kinds, rng, max_lost)
            if outcome.kills or outcome.failures:
                break
        else:
            outcome.failures.append(f"ended {MAX_TRIES} times before its kill")
        outcome.failures += outcome.damaged or ([] if outcome.failures else differences(job.run, reference))
        kills = "; ".join(map(str, outcome.kills)) or "no kill"
        lost = " ".join(map(str, outcome.lost)) or "-"
        verdict = f"FAILED, see {job.run.parent}: {outcome.failures[0]}" if outcome.failures else "survived"
        print(
            f"run {number:2}, {variant:12} {outcome.seconds:4.0f} s: {kills}; steps lost: {lost}; {verdict}", flush=True
        )
        if not outcome.failures:
            shutil.rmtree(job.run.parent)
        return outcome

    def flips(self, number: int, full_starts: int) -> tuple[int, Counter[str]]:
        """Changes ``number`` bytes, one at a time; returns how many were detected, and how many each file had."""
        run, _ = self.undisturbed("async")
        last = list_checkpoints(run)[0]
        flips = byte_flips.draw(last, number, random.Random(f"{self._seed} bytes"))
        detected = [byte_flips.is_detected(run, flip) for flip in flips]
        for index in range(0, number, -(-number // full_starts)) if full_starts else ():
            detected[index] = self._is_detected_by_start(flips[index], f"flip_{index}") and detected[index]
        for flip, is_detected in zip(flips, detected, strict=True):
            if not is_detected:
                print(f"NOT DETECTED: {flip} in {last}", flush=True)
        return sum(detected), Counter(flip.file for flip in flips)

    def _is_detected_by_start(self, flip: byte_flips.Flip, name: str) -> bool:
        """Whether the recipe names the file, resumes from the checkpoint before, and ends as the undisturbed run."""
        reference, timing = self.undisturbed("async")
        job = self.job("async", name)
        shutil.copytree(reference, job.run, symlinks=True)
        damaged, before = list_checkpoints(job.run)
        flip.apply(damaged)
        outcome = run_killed(job, timing, [], random.Random(0), 0)
        log = job.log_text(1)
        is_named = f"{damaged} is damaged ({flip.file}" in log and f" of {before}\n" in log
        result = is_named and not outcome.failures and not differences(job.run, reference)
        print(
            f"started with a byte of {flip.file} changed: {'detected' if result else f'FAILED, see {job.run.parent}'}"
        )
        if result:
            shutil.rmtree(job.run.parent)
        return result


def summary(outcomes: list[Outcome]) -> list[str]:
    """The lines about all runs; the last one is the verdict."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    survived = sum(not outcome.failures for outcome in outcomes)
    lost = [steps for outcome in outcomes for steps in outcome.lost]
    return [
        f"killed: {_counts(Counter(kill.kind for kill in kills))}",
        f"while in: {_counts(Counter(kill.phase for kill in kills))}",
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
    parser.add_argument("--bytes", type=int, default=30, help="bytes to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/torture"), help="removed first")
    options = parser.parse_args(arguments)
    out, start = options.out.resolve(), time.monotonic()
    if out.exists() and not (out / "base").is_dir() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty and no folder of this benchmark; give another folder")
    shutil.rmtree(out, ignore_errors=True)
    print(
        f"finch {finch.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on "
        f"{os.cpu_count()} cores\npython -m benchmarks.survival --runs {options.runs} --first {options.first} --bytes {options.bytes} "
        f"--seed {options.seed}",
        flush=True,
    )
    torture = Torture(out, options.seed)
    outcomes = [torture.run(number) for number in range(options.first, options.first + options.runs)]
    detected, files = torture.flips(options.bytes, FULL_STARTS)
    print(f"{time.monotonic() - start:.0f} s in all", f"bytes changed in: {_counts(files)}", sep="\n")
    print(*summary(outcomes), f"byte changes: {detected} / {options.bytes} detected", sep="\n", flush=True)
    if detected < options.bytes or any(outcome.failures for outcome in outcomes):
        sys.exit(1)
