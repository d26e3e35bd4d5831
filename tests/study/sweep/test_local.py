"""Sweeps on this machine with small programs in the place of `finch run` and `finch evaluate`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.runs import is_running, wait_until

from finch.study.sweep import local
from finch.study.sweep.grid import Cell
from finch.study.sweep.job import Job
from finch.study.sweep.local import LocalSweep

# Appends what happens to a common file; saves at SIGINT, as a run does.
PROGRAM = """\
import os, pathlib, signal, sys, time
folder, seconds, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
events = folder.parent / "events"
def note(text):
    with events.open("a") as file:
        file.write(f"{text} {folder.name}\\n")
def save(*_):
    (folder / "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, save)
(folder / "pid").write_text(str(os.getpid()))
(folder / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
note("start")
time.sleep(max(seconds, 0))
while events.read_text().count("start") < -seconds:  # so many have started
    time.sleep(0.02)
if code:
    pathlib.Path(os.environ["FINCH_STATUS_FILE"]).write_text('{"error": "key=1 is wrong"}')
    sys.exit(code)
(folder / "epoch_0").mkdir()
note("end")
"""
EVALUATE = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'evaluated').touch(); print(sys.argv[1])"
CFG = SimpleNamespace(
    epochs=1, forgetting_budget=None, early_stopping=None, checkpointer=SimpleNamespace(checkpoint_dir="base")
)


class SmallJob(Job):
    seconds = 0.1
    failing: tuple[str, ...] = ()
    is_evaluated_too = False

    def run_command(self):
        code = "1" if self.cell.name in self.failing else "0"
        return [sys.executable, "-c", PROGRAM, str(self.cell.folder), str(self.seconds), code]

    def evaluate_commands(self):
        is_missing = self.is_evaluated_too and not (self.cell.folder / "evaluated").exists()
        return [[sys.executable, "-c", EVALUATE, str(self.cell.folder)]] if is_missing else []

    def end_evaluation(self, *, of_epochs):
        pass


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Starts a sweep of cells by name, each with the name of the one it waits for; returns (failed, events)."""

    def start(cells, *, num_parallel=1, num_gpus=0, num_ranks=1, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(SmallJob, name, value)
        evaluation = SimpleNamespace(select_by=None) if SmallJob.is_evaluated_too else None
        grid = SimpleNamespace(task=None, evaluation=evaluation, overwrites=False, keep="all")
        sources = {name: (tmp_path / source,) if source else () for name, source in cells.items()}
        cells = [Cell({"name": name}, tmp_path / name, dependencies=needed) for name, needed in sources.items()]
        jobs = [SmallJob(grid, cell, "", CFG) for cell in cells]
        (tmp_path / "events").write_text("")
        failures = LocalSweep(jobs, num_parallel=num_parallel, num_gpus=num_gpus, num_ranks=num_ranks).run()
        return failures, (tmp_path / "events").read_text().splitlines()

    return start


@pytest.mark.parametrize(
    ("visible", "num_gpus", "num_ranks", "expected"),
    [
        (None, 4, 1, {"0", "1"}),
        (None, 8, 4, {"0,1,2,3", "4,5,6,7"}),
        ("6,2,5", 3, 2, {"6,2", "5,6"}),  # one of them is shared, which the command has warned of
        (None, 2, 2, {"all"}),
    ],
)
def test_cells_at_a_time_have_gpus_of_their_own(visible, num_gpus, num_ranks, expected, sweep, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep({"a": None, "b": None}, num_parallel=2, seconds=-2, num_gpus=num_gpus, num_ranks=num_ranks)
    assert {(tmp_path / name / "gpus").read_text() for name in "ab"} == expected


def status(folder):
    return json.loads((folder / "cell.json").read_text())["status"]


def test_cells_run_one_after_the_other_and_only_once(sweep, tmp_path):
    cells = {"a": None, "b": None}
    assert sweep(cells) == ({}, ["start a", "end a", "start b", "end b"])
    assert status(tmp_path / "a") == "finished"
    assert sweep(cells) == ({}, [])


def test_two_cells_run_at_a_time(sweep):
    failed, events = sweep({"a": None, "b": None, "c": None}, num_parallel=2, seconds=-2)
    assert not failed
    assert sorted(events[:2]) == ["start a", "start b"]
    assert events.index("start c") > 2


def test_failed_cell_stops_only_those_that_need_it(sweep, tmp_path):
    cells = {"a": None, "b": None, "c": "a", "d": "b"}
    failed, events = sweep(cells, failing=("a",), num_parallel=2)
    assert failed == {"a": f"key=1 is wrong; {tmp_path / 'a.log'}", "c": "a, which it needs, has failed"}
    assert events.index("start d") > events.index("end b")
    assert (status(tmp_path / "a"), status(tmp_path / "d")) == ("failed", "finished")
    assert sweep(cells, failing=()) == ({}, ["start a", "end a", "start c", "end c"])  # tried again


def test_trained_cells_are_evaluated_once(sweep, tmp_path):
    assert sweep({"a": None, "b": None}, is_evaluated_too=True, num_parallel=2)[0] == {}
    assert status(tmp_path / "a") == "evaluated"
    (tmp_path / "b" / "evaluated").unlink()
    sweep({"a": None, "b": None})
    assert (tmp_path / "a.log").read_text() == f"{tmp_path / 'a'}\n"
    assert (tmp_path / "b.log").read_text() == f"{tmp_path / 'b'}\n" * 2


def test_interrupt_lets_the_runs_save_and_the_next_call_continues(sweep, tmp_path):
    def interrupt():
        while "start b" not in (tmp_path / "events").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, interrupt).start()
    with pytest.raises(SystemExit) as left:
        sweep({"a": None, "b": None, "c": None}, num_parallel=2, seconds=30)
    assert left.value.code == 130
    assert [(tmp_path / name / "saved").exists() for name in ("a", "b")] == [True, True]
    assert status(tmp_path / "a") == "waiting"
    assert not (tmp_path / "c").exists()
    assert sweep({"a": None, "b": None, "c": None}, seconds=0)[0] == {}


def test_closed_terminal_does_not_stop_a_sweep_under_nohup(sweep, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP)).start()
        assert sweep({"a": None}, seconds=1)[0] == {}
    finally:
        signal.signal(signal.SIGHUP, previous)


HOLDER = """\
import pathlib, sys, time
from finch.training.run import RunLock
folder = pathlib.Path(sys.argv[1])
for name in ("a", "c"):
    (folder / name).mkdir()
    (lock := RunLock(folder / name)).acquire()
    globals()[name] = lock
print("holds", flush=True)
while "end b" not in (folder / "events").read_text():
    time.sleep(0.05)
(folder / "a" / "epoch_0").mkdir()
"""


def test_cell_in_use_is_waited_for_while_others_run(sweep, tmp_path, capfd):
    """The other process finishes `a` and leaves `c` unfinished."""
    (tmp_path / "events").write_text("")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    failed, events = sweep({"a": None, "b": None, "c": None})
    assert (failed, events) == ({}, ["start b", "end b", "start c", "end c"])
    assert status(tmp_path / "a") == "finished"
    assert f"a  waiting: {tmp_path / 'a'} is in use by process {holder.pid} on " in capfd.readouterr().out
    assert holder.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux call")
def test_cells_end_with_a_killed_sweep(sweep, tmp_path):
    killed = os.fork()
    if killed == 0:
        try:
            sweep({"a": None}, seconds=600)
        finally:
            os._exit(1)  # never on into pytest
    while not (tmp_path / "a" / "pid").is_file() or "start a" not in (tmp_path / "events").read_text():
        time.sleep(0.05)
    cell = int((tmp_path / "a" / "pid").read_text())
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    wait_until(lambda: not is_running(cell))
    assert sweep({"a": None}, seconds=0)[0] == {}


def test_display_prints_a_reason_once(capsys):
    display = local._Display()
    states = {name: f"failed: no rows; out/{name}.log" for name in ("lr1", "lr2")} | {"lr3": "failed: no disk"}
    display.update(states, {})
    display.update(states, {})
    assert capsys.readouterr().out.splitlines() == [
        "lr1  failed: no rows; out/lr1.log",
        "lr2  failed, as lr1",
        "lr3  failed: no disk",
    ]
