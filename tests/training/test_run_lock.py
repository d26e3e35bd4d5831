"""One run a folder; the lock goes with its holder."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from finch.errors import UserError
from finch.training import run_lock
from finch.training.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from finch.training.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.hold()
lock.sign()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.2)


def test_a_second_start_is_told_who_holds_it_until_the_holder_dies(tmp_path, monkeypatch):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for start in (RunLock(tmp_path).check, RunLock(tmp_path).hold):
            with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on \S+ since 2"):
                start()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    lock = RunLock(tmp_path)
    lock.check()
    lock.hold()
    lock.release()


def test_released_though_a_forked_process_has_the_file_open(tmp_path):
    lock = RunLock(tmp_path)
    lock.hold()
    ended = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=ended.wait, args=(60,))
    child.start()
    lock.release()
    RunLock(tmp_path).check()
    ended.set()
    child.join()


def test_looking_changes_nothing(tmp_path):
    RunLock(tmp_path).check()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_a_run_goes_on_with_a_warning(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="nothing keeps a second run out"):
        RunLock(tmp_path).hold()
