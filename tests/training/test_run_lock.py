"""One run per folder; the lock ends with its holder."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from finch.errors import UserError
from finch.training import run as run_module
from finch.training.run import RunLock

HOLDER = """
import multiprocessing, sys, time
from pathlib import Path
from finch.training.run import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch):
    monkeypatch.setattr(run_module, "ACQUIRE_TIMEOUT_S", 0.2)


def test_second_run_names_the_holder_until_it_is_killed(tmp_path):
    """A data-loader worker that the killed holder has forked, and that is still alive, does not keep the lock."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    try:
        for start in (RunLock(tmp_path).check, RunLock(tmp_path).acquire, RunLock(tmp_path).acquire):
            with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on \S+ since 2.*; wait for it"):
                start()
        holder.kill()
        holder.wait()
        lock = RunLock(tmp_path)
        lock.check()
        lock.acquire()
        lock.release()
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_release_frees_a_lock_acquired_twice_and_forked(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.acquire()
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    child = context.Process(target=ended.wait, args=(60,))
    child.start()
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
        RunLock(tmp_path).check()
    lock.release()
    RunLock(tmp_path).check()
    ended.set()
    child.join()


def test_check_creates_nothing(tmp_path):
    RunLock(tmp_path).check()
    RunLock(tmp_path / "absent").check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_locks_gives_a_warning(number, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unsupported)
    lock = RunLock(tmp_path)
    for start in (lock.acquire, lock.check):
        with pytest.warns(UserWarning, match="is on a file system without locks: a second run could write into it"):
            start()
    lock.release()
