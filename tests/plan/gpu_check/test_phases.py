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

from finch.plan.gpu_check import machine, meshes, phases
from finch.plan.gpu_check.phases import PHASES, run_phases
from finch.plan.gpu_check.processes import Ranks

pytestmark = pytest.mark.usefixtures("check")  # for the environment


def run(out, *chosen, ranks=1):
    is_right = run_phases(out / "page", device="cuda", ranks=ranks, quick=True, phases=chosen)
    return is_right, json.loads((out / "page.json").read_text())["phases"], (out / "page.md").read_text()


class RanksUntilTheyHang(Ranks):
    """The deadline comes half a second after the phase and its ranks wait, however long a busy machine takes to start them."""

    def wait(self, end):
        folder = self._logs[0].parent
        logs = [folder / f"{name}.log" for name in ("phase", "rank_rank_0", "rank_rank_1")]
        while self.codes == [None] and not all(log.exists() and "waits" in log.read_text() for log in logs):
            time.sleep(0.05)
            assert time.time() < end
        return super().wait(time.time() + 0.5)


def test_hanging_phase_ends_at_its_deadline_with_the_stacks_of_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "Ranks", RanksUntilTheyHang)
    is_right, reports, page = run(tmp_path, phase("quick"), phase("hang", deadline_s=300.0), phase("quick"))
    assert is_right  # time is never an error
    assert [report["status"] for report in reports] == ["ok", "ok", "ok"]
    names = [(line["name"], line["status"]) for line in reports[1]["lines"]]
    assert names == [("before", "ok"), ("hang: the rest", "not run")]
    for process in ("phase", "rank_rank_0", "rank_rank_1"):
        assert f"{process}:" in reports[1]["stacks"]
    assert reports[1]["stacks"].count("in wait_for_lock") == 3
    assert "in wait_for_lock" in page


def test_ranks_that_hang_are_ended_with_their_stacks_and_the_phase_goes_on(tmp_path):
    is_right, [report], _ = run(tmp_path, phase("hang_in_ranks"))
    assert not is_right
    assert [(line["name"], line["seen"]) for line in report["lines"]] == [("ranks end", False), ("after", 1)]
    assert report["stacks"].count("in wait_for_lock") == 2


def test_quick_check_leaves_out_what_has_no_deadline(tmp_path):
    is_right, [report], _ = run(tmp_path, phase("fail", deadline_s=0))
    assert is_right
    assert [line["status"] for line in report["lines"]] == ["not run"]


@pytest.mark.parametrize(
    ("target", "statuses"), [("end_at_once", ["failed", "not run"]), ("hang_at_once", ["not run"] * 2)]
)
def test_meshes_that_are_not_reached_are_not_run(target, statuses, check, monkeypatch):
    monkeypatch.setattr(meshes, "RANK_TARGET", f"helpers.gpu_check_phases:{target}")
    monkeypatch.setattr(meshes, "MESHES", {"one": {}, "two": {}})
    check.end = time.time() + (0 if target == "hang_at_once" else 300)
    meshes.run(check)
    assert [line.status for line in check.lines] == statuses


def test_case_that_a_deadline_ends_is_not_run(check):
    with check.case("all-reduce"):
        check.ranks, check.end = 2, time.time()
        machine.all_reduce_rate(check)
    assert [(line.name, line.status) for line in check.lines] == [("all-reduce", "not run")]


def test_errors_are_failed_lines(tmp_path):
    is_right, [failed, ended], page = run(tmp_path, phase("fail"), phase("end"))
    assert not is_right
    assert failed["lines"][0]["note"] == "RuntimeError: broken"
    assert [line["status"] for line in ended["lines"]] == ["ok", "failed"]
    assert "exit code 1: no more" in ended["lines"][1]["note"]
    assert "RuntimeError: broken" in page


def test_line_of_a_process_that_was_ended_while_it_wrote_is_left_out(check):
    check.equal("one", 1, 1)
    with (check.folder / "lines.jsonl").open("a") as file:
        file.write('\n{"name": "cut')
    check.equal("two", 2, 2)
    assert [line.name for line in check.all_lines()] == ["one", "two"]


def test_phase_for_several_gpus_is_not_run_on_one(tmp_path):
    is_right, [report], _ = run(tmp_path, PHASES[5]._replace(quick_deadline_s=300.0))
    assert is_right
    assert (report["status"], report["lines"][0]["note"]) == ("not run", "needs 2 GPUs, this machine has one")


def test_deadlines_add_up_to_what_the_help_says():
    assert sum(each.deadline_s for each in PHASES) <= 9 * 60
    assert sum(each.quick_deadline_s for each in PHASES) <= 2.5 * 60


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
    reports = json.loads((tmp_path / "page.json").read_text())["phases"]
    assert [report["status"] for report in reports] == ["ok", "interrupted"]
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


def _descendants(process):
    time.sleep(1)  # the second phase starts
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    assert found
    return found
