"""Runs a sweep on this machine: some cells at a time, each in a separate process, then their evaluations."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from finch.base import status as program_status
from finch.base.errors import UserError
from finch.base.files import remove
from finch.base.progress import duration
from finch.distributed.processes import die_with_parent, share_cores
from finch.study.sweep.grid import EVALUATED, FAILED, FINISHED, RUN, RUNNING, SMALL_LR, WAITING, WISE_FT, write_cell
from finch.study.sweep.job import Job, slurm_error
from finch.study.sweep.select_lr import MAX_FORGETTING, rates_of, select_rate
from finch.training.run import RunLock

_POLL_S = 0.2
_PROGRESS_S = 1.0
_LINE_INTERVAL_S = 60.0
_SCORING, _EVALUATING = "scoring", "evaluating"
"""Of the epochs, which chooses the cell's model; of the model."""
_IDLE = (WAITING, FINISHED, EVALUATED)


class _Stopped(BaseException):
    """A signal that ends the sweep."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class _Running:
    """A process of a cell."""

    process: subprocess.Popen[bytes]
    slot: int


@dataclass
class _State:
    """A job and how far it is."""

    job: Job
    status: str = WAITING
    reason: str = ""
    has_model: bool = False  # it is trained and its model is chosen
    running: _Running | None = None
    commands: list[list[str]] = field(default_factory=list)  # evaluations that are left

    def write(self, status: str, source: Path | None = None) -> None:
        write_cell(self.job.cell, task=self.job.grid.task, status=status, source=source)


class LocalSweep:
    """Trains and evaluates the cells of a grid.

    A cell that is finished is skipped and one that was cut off resumed, by what its folder holds. A cell that fails does not stop the
    others, nor does one in whose folder another process runs: it is started when that has ended. The pretrained model is evaluated once for
    all: until it has results, one evaluation of a kind runs at a time. At most ``num_parallel`` cells have all of their epochs at a time.

    Args:
        jobs: the cells, each after those that it depends on.
        num_parallel: processes at a time.
        num_gpus: shared by the processes, ``num_ranks`` each in turn. Not more than that: all see the same devices.
        num_ranks: of a run.
        trains: whether cells are trained. If not, only those that are finished are evaluated.
    """

    def __init__(
        self, jobs: Sequence[Job], *, num_parallel: int, num_gpus: int = 0, num_ranks: int = 1, trains: bool = True
    ) -> None:
        self._states = {job.cell.folder: _State(job) for job in jobs}
        self._num_parallel, self._num_gpus, self._num_ranks, self._trains = num_parallel, num_gpus, num_ranks, trains
        self._base_results: set[str] = set()  # kinds of evaluations that the pretrained model has results of
        self._shown_at = 0.0
        self._display = _Display()

    def run(self) -> dict[str, str]:
        """Returns the reason of each cell that failed. Ctrl-C, SIGTERM and SIGHUP stop the runs, which save, and end the process with 128 +
        the signal's number.
        """
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            numbers.pop()
        previous = {number: signal.signal(number, _raise_stopped) for number in numbers}
        try:
            for state in self._states.values():
                remove(state.job.cell.status)  # of a sweep that was killed
                self._poll_run(state)
            while self._step():
                time.sleep(_POLL_S)
        except _Stopped as stopped:
            self._stop(stopped.number)
            raise SystemExit(128 + stopped.number) from None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return {folder.name: state.reason for folder, state in self._states.items() if state.status == FAILED}

    def _poll_run(self, state: _State) -> None:
        """Reads what an earlier call has left."""
        job = state.job
        if job.cell.kind == SMALL_LR:  # chosen again, as the grid may have more rates
            return
        if job.grid.overwrites and self._trains:
            return
        if job.cell.kind == WISE_FT and not self._states[job.cell.dependencies[0]].has_model:
            return  # what it is made of may change
        if job.is_trained():
            self._set_trained(state)
        elif not self._trains and job.cell.kind == RUN:
            message = slurm_error(job.cell.folder)
            self._fail(state, "it is not trained to the end" + (f": {message}" if message else ""))

    def _step(self) -> bool:
        """Handles processes that have ended and starts others. Returns whether anything is left to wait for."""
        for state in self._states.values():
            if state.running is not None and state.running.process.poll() is not None:
                self._end(state, state.running)
        for state in self._states.values():
            if len(self._running()) < self._num_parallel:
                self._start_next(state)
        self._show()
        return bool(self._running()) or any(state.status == WAITING for state in self._states.values())

    def _has_room_for_epochs(self) -> bool:
        states = self._states.values()
        return sum(one.status not in (WAITING, FAILED) and not one.has_model for one in states) < self._num_parallel

    def _running(self) -> list[_Running]:
        return [state.running for state in self._states.values() if state.running is not None]

    def _start_next(self, state: _State) -> None:
        """Starts the cell's next process, if it is its turn."""
        if state.running is not None or state.status == FAILED:
            return
        if state.status == WAITING:
            job, needed = state.job, [self._states[folder] for folder in state.job.cell.dependencies]
            if not all(self._is_finished(other, job) for other in needed) or not self._is_free(state):
                return
            if job.cell.kind == SMALL_LR:
                self._select(state)
            elif not all(other.has_model for other in needed):
                self._fail(state, f"{needed[0].job.cell.name}, which it needs, has failed")
            elif self._has_room_for_epochs():
                self._poll_run(state)  # WiSE-FT's model may be that of the source's chosen epoch already
                if state.status == WAITING:
                    job.prepare()
                    state.write(RUNNING)
                    self._start(state, job.run_command(), RUNNING)
            return
        kind = _EVALUATING if state.has_model else _SCORING
        is_first = kind not in self._base_results  # others of the kind wait for what it writes of the pretrained model
        if state.commands and not (is_first and any(other.status == kind for other in self._states.values())):
            self._start(state, state.commands[0], kind)

    def _is_free(self, state: _State) -> bool:
        """Whether the cell can be started: not while another process runs in its folder, nor if that one has finished it."""
        was_in_use, holder = bool(state.reason), RunLock(state.job.cell.folder).holder()
        state.reason = "" if holder is None else f"{state.job.cell.folder} is in use by {holder}"
        if was_in_use and holder is None:
            self._poll_run(state)
        return holder is None and state.status == WAITING

    @staticmethod
    def _is_finished(state: _State, job: Job) -> bool:
        """Whether a cell that ``job`` depends on has its model (for small_lr also evaluated) or has failed."""
        return state.status in (EVALUATED, FAILED) or (state.has_model and job.cell.kind != SMALL_LR)

    def _select(self, state: _State) -> None:
        """Links small_lr's folder to the SFT run of the rate that the paper's rule chooses, with this cell's seed where it has one."""
        job = state.job
        evaluated = [source for source in job.cell.dependencies if self._states[source].status == EVALUATED]
        try:
            rates = rates_of(evaluated, "sft") if evaluated else []
            rate = select_rate(rates, MAX_FORGETTING)
        except UserError as error:
            self._fail(state, str(error))
            return
        if rate is None:
            text = ", ".join(f"{each.lr:g}: {each.forgetting.mean:.1f}" for each in rates) or "none is evaluated"
            self._fail(state, f"no rate of sft has less than {MAX_FORGETTING:g} points of average forgetting ({text})")
            return
        seed = job.cell.values.get("seed")
        seeds = {self._states[run].job.cell.values.get("seed"): run for run in rate.runs}
        if seed is not None and seed not in seeds and seeds.keys() != {None}:
            self._fail(state, f"sft has no evaluated run of seed {seed} at the rate that was chosen, {rate.lr:g}")
            return
        job.link_to(seeds.get(seed, rate.runs[0]))
        self._set_trained(state)

    def _start(self, state: _State, command: list[str], status: str) -> None:
        slot = min(set(range(self._num_parallel)) - {running.slot for running in self._running()})
        environment = dict(os.environ)
        share_cores(environment, self._num_parallel)
        environment |= {"PYTHONUNBUFFERED": "1", program_status.STATUS_FILE: str(state.job.cell.status)}
        remove(state.job.cell.status)
        if self._num_gpus > self._num_ranks:
            visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self._num_gpus)))).split(",")
            own = range(slot * self._num_ranks, (slot + 1) * self._num_ranks)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[each % self._num_gpus] for each in own)
        with state.job.cell.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=die_with_parent,  # a cell without its sweep would keep the next one from its folder
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which passes it on once
            )
        state.running, state.status, state.reason = _Running(process, slot), status, ""

    def _end(self, state: _State, running: _Running) -> None:
        """After a process: the next state is what its folder says."""
        job, code = state.job, running.process.returncode
        error = program_status.read(job.cell.status)["error"]
        remove(job.cell.status)
        state.running = None
        if code != 0 and state.status == RUNNING and RunLock(job.cell.folder).holder() is not None:
            state.status = WAITING  # another process was there first
        elif code != 0:
            what = {_EVALUATING: "evaluation: ", _SCORING: "scoring its epochs: "}.get(state.status, "")
            ended = f"killed by {signal.Signals(-code).name}" if code < 0 else error or f"exit code {code}"
            self._fail(state, f"{what}{ended}; {job.cell.log}")
        elif state.status in (_SCORING, _EVALUATING):
            ended = state.commands[0]
            job.end_evaluation(of_epochs=state.status == _SCORING)
            self._set_trained(state)
            if state.commands[:1] == [ended]:  # else it would be started again and again
                self._fail(state, f"evaluation: it has written no result to {job.cell.folder}; {job.cell.log}")
        else:
            job.finish()
            if job.is_trained():
                self._set_trained(state)
            else:
                self._fail(state, "stopped before its end; finch sweep resumes it")

    def _set_trained(self, state: _State) -> None:
        job = state.job
        job.select_epoch()
        state.has_model, state.commands = job.is_selected(), job.evaluate_commands()
        is_evaluated = job.grid.evaluation is not None and not state.commands
        self._base_results |= {_SCORING} if state.has_model else set()
        self._base_results |= {_EVALUATING} if is_evaluated else set()
        state.status, state.reason = EVALUATED if is_evaluated else FINISHED, ""
        state.write(state.status, source=_linked_source(job))
        job.remove_surplus()

    def _fail(self, state: _State, reason: str) -> None:
        state.status, state.reason, state.commands = FAILED, reason, []
        if state.job.cell.folder.is_dir():
            state.write(FINISHED if state.has_model else FAILED)  # of its models only the chosen one may be left

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < _PROGRESS_S and self._running():
            return
        self._shown_at = now
        texts, progress = {}, {}
        for folder, state in self._states.items():
            texts[folder.name] = f"{state.status}: {state.reason}" if state.reason else state.status
            if state.running is not None:
                progress[folder.name] = progress_of(state.job.cell.status)
        self._display.update(texts, progress)

    def _stop(self, number: int) -> None:
        """Sends the signal to the runs once and waits for them: they save. A second signal kills them."""
        processes = [running.process for running in self._running()]
        runs = "the running cell saves its" if len(processes) == 1 else f"{len(processes)} running cells save their"
        print(f"\nstopping: {runs} state; once more to kill", flush=True)
        try:
            _end_groups(processes, number)
        except _Stopped:
            _end_groups(processes, signal.SIGKILL)
        for state in self._states.values():
            if state.running is not None:
                state.write(FINISHED if state.job.is_trained() else WAITING)
        print("stopped; the same command resumes the sweep", flush=True)


def _linked_source(job: Job) -> Path | None:
    """The run that a folder of small_lr links to."""
    if job.cell.kind != SMALL_LR:
        return None
    return job.cell.folder.parent / (job.cell.folder / "best").readlink().parts[1]


def _end_groups(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, number)
    for process in processes:
        process.wait()


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


class _Display:
    """The cells of a running sweep: a table that is redrawn in a terminal, or lines in a log file."""

    def __init__(self) -> None:
        self._shown: Mapping[str, str] = {}
        self._failed_first: dict[str, str] = {}  # by the reason
        self._num_lines = 0
        self._last_time = time.monotonic()

    def update(self, states: Mapping[str, str], progress: Mapping[str, str]) -> None:
        """
        Args:
            states: of each cell, in a few words.
            progress: step and time left of the running cells.
        """
        width = max(map(len, states), default=0)
        if sys.stdout.isatty():
            self._redraw({name: f"{text} {progress.get(name, '')}".rstrip() for name, text in states.items()}, width)
            return
        for name, text in states.items():
            if text not in (WAITING, self._shown.get(name)):
                is_failure = text.startswith(f"{FAILED}: ")
                first = self._failed_first.setdefault(text.replace(name, ""), name) if is_failure else name
                print(f"{name:<{width}}  {text if first == name else f'{FAILED}, as {first}'}", flush=True)
        self._shown = states
        if time.monotonic() - self._last_time >= _LINE_INTERVAL_S:
            self._last_time = time.monotonic()
            done = sum(not state.startswith((WAITING, RUNNING, _SCORING, _EVALUATING)) for state in states.values())
            running = ", ".join(f"{name} {text}" for name, text in progress.items() if text)
            print(f"{done} of {len(states)} cells done{'; ' if running else ''}{running}", flush=True)

    def _redraw(self, texts: Mapping[str, str], width: int) -> None:
        size = shutil.get_terminal_size()
        names = list(texts)
        if len(names) > size.lines - 3:  # those that have work left or have failed
            names = [name for name in names if not texts[name].startswith(_IDLE)]
            names = names[: max(size.lines - 3, 1)]
        lines = [f"{name:<{width}}  {texts[name]}"[: size.columns - 1] for name in names]
        if len(names) < len(texts):
            counts = {word: sum(text.startswith(word) for text in texts.values()) for word in _IDLE}
            lines.append(", ".join(f"{number} {word}" for word, number in counts.items() if number))
        up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J", end="", flush=True)
        self._num_lines = len(lines)


def progress_of(status_file: Path) -> str:
    """``epoch 1/2, 25 of 300, 0:01:10 left``; empty before there is a speed."""
    found = program_status.read(status_file)
    if found["seconds_left"] is None:
        return ""
    return f"{found['phase']}, {found['done']:,} of {found['total']:,}, {duration(found['seconds_left'])} left"
