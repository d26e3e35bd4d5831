"""The loop over phases: each in a process of its own, ended at its deadline; what was seen is written after each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.gpu_check_phases import phase

from finch.plan.gpu_check import phases
from finch.plan.gpu_check.phases import PHASES, run_phases
from finch.plan.gpu_check.processes import Ranks

pytestmark = pytest.mark.usefixtures("check")  # for the environment


def run(out, *chosen, ranks=1):
    is_right = run_phases(out, device="cuda", ranks=ranks, quick=True, phases=chosen)
    return is_right, json.loads((out / "gpu_check.json").read_text())["phases"], (out / "gpu_check.md").read_text()


class RanksUntilTheyHang(Ranks):
    """The deadline comes half a second after both ranks wait, however long a busy machine takes to start them."""

    def wait(self, end):
        logs = [self._logs[0].with_name(f"rank_rank_{rank}.log") for rank in range(2)]
        while self.processes[0].poll() is None and not all(log.exists() and "waits" in log.read_text() for log in logs):
            time.sleep(0.05)
            assert time.time() < end
        return super().wait(time.time() + 0.5)


def test_hanging_phase_ends_at_its_deadline_with_the_stacks_of_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "Ranks", RanksUntilTheyHang)
    is_right, reports, page = run(tmp_path, phase("quick"), phase("hang", 2, deadline_s=300.0), phase("quick", 3))
    assert not is_right
    assert [report["status"] for report in reports] == ["ok", "failed", "ok"]
    names = [(line["name"], line["status"]) for line in reports[1]["lines"]]
    assert names == [("before", "ok"), ("hang", "failed")]
    for process in ("phase", "rank_rank_0", "rank_rank_1"):
        assert f"{process}:" in reports[1]["stacks"]
    assert reports[1]["stacks"].count("in wait_for_lock") == 2
    assert "in wait_for_lock" in page


def test_errors_are_failed_lines(tmp_path):
    is_right, [failed, ended], page = run(tmp_path, phase("fail"), phase("end", 2))
    assert not is_right
    assert failed["lines"][0]["note"] == "RuntimeError: broken"
    assert [line["status"] for line in ended["lines"]] == ["ok", "failed"]
    assert "exit code 1: no more" in ended["lines"][1]["note"]
    assert "RuntimeError: broken" in page


def test_speed_does_not_decide(tmp_path):
    assert run(tmp_path, phase("fail", 6), phase("fail", 0))[0]


def test_phases_for_several_gpus_are_not_run_on_one(tmp_path):
    is_right, [report], _ = run(tmp_path, *(each for each in PHASES if each.min_ranks > 1))
    assert is_right
    assert (report["status"], report["lines"][0]["note"]) == ("not run", "needs 2 GPUs, this machine has one")


def test_deadlines_add_up_to_ten_minutes_and_three():
    assert sum(each.deadline_s for each in PHASES) <= 600
    assert sum(each.quick_deadline_s for each in PHASES) <= 180


def test_interrupt_leaves_what_was_done(tmp_path):
    heard = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    )
    code = f"{heard}; from helpers.gpu_check_phases import main; main({str(tmp_path)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # the first phase has ended
    children = _descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 130
    assert "finch: interrupted" in output
    reports = json.loads((tmp_path / "gpu_check.json").read_text())["phases"]
    assert [report["status"] for report in reports] == ["ok", "interrupted"]
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


def _descendants(process):
    time.sleep(1)  # the second phase starts
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    assert found
    return found
