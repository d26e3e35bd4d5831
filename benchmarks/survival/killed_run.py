"""One run of a two-rank job that is killed at random instants and started again until it ends."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.survival.slowed_recipe import END, START, phases_file
from benchmarks.tiny_job import ROOT, environment, torchrun
from finch.base.run_files import METRICS, read_metrics

RECIPE = "benchmarks.survival.slowed_recipe"
TAG = "FINCH_TORTURE"
"""The variable in the environment by which all processes of a job are found, orphans included."""
SIGTERM = "SIGTERM"
# What is killed, with weights: all processes, the launcher, one rank. SIGTERM is sent to the launcher, which may exit in order.
KINDS = {"tree": 13, "launcher": 3, "rank": 2, SIGTERM: 2}
SHARE_OF_KILLS_AT_START = 0.15
MAX_KILLS = 3
MAX_TRIES = 5  # on a machine that has become faster a run may end before its kill
ATTEMPT_TIMEOUT_S = 240.0
EXIT_TIMEOUT_S = 15.0  # of processes that end with their launcher
# Of ranks that have lost a peer, that finish their step after SIGTERM, or that still import: these have not yet asked the system to
# be killed with their launcher.
SLOW_EXIT_TIMEOUT_S = 90.0


def members(tag: str) -> list[psutil.Process]:
    """The living processes that were started with ``TAG=tag``."""
    # No environment: it is a zombie, or another user's.
    return [each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(TAG) == tag]


def kill_all(tag: str) -> None:
    """Kills them in a random order, and what they have started meanwhile, until none is left."""
    while living := members(tag):
        for process in random.sample(living, len(living)):
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_until_gone(tag: str, seconds: float) -> list[psutil.Process]:
    """Returns the processes that are still alive after ``seconds``."""
    end = time.monotonic() + seconds
    while (living := members(tag)) and time.monotonic() < end:
        time.sleep(0.05)
    return living


class Job:
    """
    Args:
        config: the recipe's config file.
        run: the run's folder, as in the config.
        recipe: the module that torchrun starts.

    Attributes:
        launcher, log: of the last start.
    """

    launcher: subprocess.Popen[bytes]
    log: Path

    def __init__(self, config: Path, run: Path, recipe: str = RECIPE) -> None:
        self.run, self.recipe, self.tag = run, recipe, str(run)
        # Starts or resumes the job.
        self.command = torchrun(2, "-m", recipe, "--config", str(config), "resume_from_checkpoint=auto")

    @contextlib.contextmanager
    def started(self, attempt: int) -> Iterator[None]:
        """Starts the launcher in a new session; the output of all processes goes into ``log``. None of them is left at the end."""
        phases_file(self.run).unlink(missing_ok=True)
        self.log = self.run.with_name(f"{self.run.name}.{attempt}.log")
        env, cwd = environment(ROOT, **{"OMP_NUM_THREADS": "1", TAG: self.tag}), self.run.parent
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=env, cwd=cwd, start_new_session=True
            )
        try:
            yield
        finally:
            kill_all(self.tag)
            self.launcher.wait()

    def wait(self, until: float, is_reached: Callable[[str], bool] = lambda phase: False) -> bool:
        """Waits until an instant or a phase; returns whether the launcher still runs."""
        while self.launcher.poll() is None and time.monotonic() < until and not is_reached(self.phase()):
            time.sleep(0.002)
        return self.launcher.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def failure(self) -> str:
        """The launcher's exit code and the log's last lines."""
        tail = " | ".join(self.log_text().strip().splitlines()[-5:])
        return f"exited with {self.launcher.returncode}: {tail}"

    def phase(self) -> str:
        """What rank 0 is doing, or did last."""
        with contextlib.suppress(FileNotFoundError, IndexError):
            return phases_file(self.run).read_text(encoding="utf-8").splitlines()[-1]
        return START

    def last_step(self) -> int:
        """The last step in metrics.jsonl."""
        file = self.run / METRICS
        return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0


class Timing(NamedTuple):
    """Of an undisturbed run: seconds until its first step, seconds from there until its last save is done, and its steps."""

    start_s: float
    training_s: float
    steps: int


class Kill(NamedTuple):
    """What was killed, and what rank 0 was doing then, after which step."""

    kind: str
    phase: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} at {self.step}"


@dataclass
class Outcome:
    """Attributes:
    lost: steps to repeat, for each start after a kill that reached its training.
    failures: messages; empty: the run has ended, and no start found a damaged checkpoint. A kill may leave incomplete ones only.
    """

    kills: list[Kill] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run_undisturbed(job: Job) -> Timing:
    """
    Raises:
        RuntimeError: the job fails even without kills.
    """
    start = time.monotonic()
    with job.started(0):
        job.wait(start + ATTEMPT_TIMEOUT_S, lambda phase: phase != START)
        first_step = time.monotonic()
        job.wait(start + ATTEMPT_TIMEOUT_S, lambda phase: phase == END)
        last_save = time.monotonic()
        job.wait(start + ATTEMPT_TIMEOUT_S)
    if job.launcher.returncode != 0:
        raise RuntimeError(f"the undisturbed run {job.failure()}")
    return Timing(first_step - start, last_save - first_step, job.last_step())


def run_killed(job: Job, timing: Timing, kinds: Sequence[str], rng: random.Random, max_lost: int) -> Outcome:
    """Starts the job, kills it and starts it again, once for each of ``kinds``, and then lets it end.

    Args:
        kinds: of the kills, see ``KINDS``, in order.
        rng: draws the instants.
        max_lost: steps that a kill may cost; more is a failure.
    """
    outcome = Outcome()
    for attempt, kind in enumerate((*kinds, None), 1):
        step_before = job.last_step()
        with job.started(attempt):
            kill = _run_until_kill(job, timing, kind, rng)
            is_fast = kill is None or kill.kind == "tree" or (kill.kind == "launcher" and kill.phase != START)
            survivors = wait_until_gone(job.tag, EXIT_TIMEOUT_S if is_fast else SLOW_EXIT_TIMEOUT_S)
        outcome.failures += [f"attempt {attempt} left process {process.pid} behind" for process in survivors]
        _check_resume(outcome, job, attempt, step_before, max_lost)
        if kill is not None:
            outcome.kills.append(kill)
        elif job.launcher.returncode != 0:
            outcome.failures.append(f"attempt {attempt} {job.failure()}")
        if outcome.failures or kill is None:
            break
    return outcome


def _run_until_kill(job: Job, timing: Timing, kind: str | None, rng: random.Random) -> Kill | None:
    """Waits for the instant and kills; None: the job ended before, or ``kind`` is None."""
    start = time.monotonic()
    deadline = start + ATTEMPT_TIMEOUT_S
    at_start, fraction = rng.random() < SHARE_OF_KILLS_AT_START, rng.random()
    if at_start:
        instant = start + fraction * timing.start_s
    else:
        job.wait(deadline, lambda phase: phase != START)
        # Within the rest of the training: a kill after its end would be none.
        instant = time.monotonic() + fraction * timing.training_s * (1 - job.last_step() / timing.steps)
    if not job.wait(deadline if kind is None else min(instant, deadline)) or kind is None:
        return None
    launcher, phase = job.launcher, job.phase()
    ranks = [
        each
        for each in psutil.process_iter(["ppid", "cmdline"])
        if each.info["ppid"] == launcher.pid and job.recipe in (each.info["cmdline"] or ())
    ]
    if kind == SIGTERM:
        launcher.send_signal(signal.SIGTERM)
        return Kill(kind, phase, job.last_step())
    if kind == "launcher":
        launcher.kill()
    elif kind == "rank" and ranks:
        rng.choice(ranks).kill()
    else:
        kind = "tree"
        kill_all(job.tag)
    return Kill(kind, job.phase(), job.last_step())


def _check_resume(outcome: Outcome, job: Job, attempt: int, step_before: int, max_lost: int) -> None:
    """Reads from the attempt's log which step it has resumed from."""
    text = job.log_text()
    outcome.failures += re.findall(r"\S+ is damaged \(.*\)", text)
    resumed = re.search(r"resumed from step (\d+) of", text)
    if attempt == 1 or (resumed is None and job.phase() == START):
        return
    lost = step_before - (int(resumed[1]) if resumed else 0)
    outcome.lost.append(lost)
    last = outcome.kills[-1]
    allowed = 0 if last.kind == SIGTERM and last.phase != START else max_lost
    if lost > allowed:
        outcome.failures.append(f"attempt {attempt} lost {lost} steps, more than {allowed}, after {last}")
