"""Signals are recorded, handlers are restored; a second signal ends the process."""

import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers.runs import environment, is_running

from finch.distributed.processes import init_loader_worker
from finch.distributed.watchdog import Signals

SCRIPT = """
import os, signal, sys
from finch.distributed.watchdog import Signals
signals = Signals(before_training=lambda: print("before", flush=True))
signals.install()
if "train" in sys.argv:
    signals.start()
for name in sys.argv[2:]:
    os.kill(os.getpid(), getattr(signal, name))
print(signals.is_terminated or signals.is_interrupted)
"""


@pytest.mark.parametrize(
    ("number", "requeue"),
    [(signal.SIGTERM, True), (signal.SIGUSR1, True), (signal.SIGUSR2, True), (signal.SIGINT, False)],
)
def test_signal_stops_the_run_and_handlers_are_restored(number, requeue):
    previous = signal.getsignal(number)
    signals = Signals()
    signals.install()
    signals.start()
    assert (signals.is_terminated, signals.is_interrupted) == (False, False)
    os.kill(os.getpid(), number)
    assert (signals.is_terminated, signals.is_interrupted) == (requeue, not requeue)
    signals.restore()
    assert signal.getsignal(number) is previous


def run_python(code, *arguments, **changes):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**changes), check=False)


run_script = functools.partial(run_python, SCRIPT)


def test_second_signal_exits_at_once():
    done = run_script("train", "SIGTERM")
    assert (done.stdout, done.stderr) == (
        "True\n",
        "\nfinch: saving after this step or the next; once more ends the run without saving\n",
    )
    done = run_script("train", "SIGTERM", "SIGINT")
    assert (done.returncode, done.stdout) == (130, "")
    # Under a launcher the same signal arrives twice: from the system to the whole tree, and forwarded.
    done = run_script("train", "SIGTERM", "SIGTERM", RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "True\n")


TERMINAL = """
import fcntl, os, pathlib, signal, sys, termios, time
from finch.distributed.watchdog import Signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signals = Signals()
signals.start()
print("up", flush=True)
while not signals.is_terminated:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGHUP)  # the shell's
print("a step that is logged", flush=True)
pathlib.Path(sys.argv[1]).write_text("saved")
"""


def test_a_closed_terminal_ends_the_run_after_the_step(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", TERMINAL, str(tmp_path / "end")]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment()
    )
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        assert terminal.readline() == b"up\r\n"
    assert process.wait(300) == 0
    assert (tmp_path / "end").read_text() == "saved"
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SCRIPT  # as nohup does
    assert run_python(ignored, "train", "SIGHUP").stdout == "False\n"


def test_signal_before_training_exits_after_the_callback():
    done = run_script("setup", "SIGUSR1")
    assert (done.returncode, done.stdout) == (0, "before\n")


def sleep_as_worker(is_ready):
    init_loader_worker(0)
    is_ready.set()
    time.sleep(1000)


def test_loader_worker_obeys_only_its_trainer():
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    worker = context.Process(target=sleep_as_worker, args=(is_ready,))
    worker.start()
    assert is_ready.wait(300)
    for name in ("TERM", "INT", "USR1", "USR2", "HUP"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)  # from another process
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(300)
    assert worker.exitcode == 143


CHILD = """
import os, subprocess, sys, time
code = "from finch.distributed.processes import die_with_parent; import time; die_with_parent(); print('up', flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_process_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 300
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("launcher", ["runs", "has ended", "is not torchrun"])
def test_rank_without_its_launcher_exits(launcher):
    """The kernel reports a parent's end only after prctl: the launcher may be killed while its ranks import."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        if launcher != "runs":
            store.close()
        changes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if launcher != "is not torchrun":
            changes["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        code = "from finch.distributed.processes import die_with_parent; die_with_parent(); print('up')"
        done = run_python(code, **changes)
    if launcher == "has ended":
        assert (done.returncode, done.stdout) == (1, "")
        assert "the launcher of this rank has ended" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "up\n")
