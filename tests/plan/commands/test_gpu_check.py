"""`finch doctor --gpu` as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.runs import ROOT, environment

from finch.plan.gpu_check.phases import PHASES


def gpu_check(*options, cwd):
    command = [sys.executable, "-m", "finch.cli", "doctor", "--gpu", *options]
    env = environment(ROOT, ROOT / "recipes", CUDA_VISIBLE_DEVICES="")
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800, check=False)


def test_without_a_gpu_it_offers_the_cpu(tmp_path):
    done = gpu_check(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.split("\n")[1:] == [
        "finch: error: finch doctor --gpu finds no GPU (torch.cuda sees 0): add --cpu for tiny models on the CPU",
        "",
    ]
    assert not any(tmp_path.iterdir())


def test_out_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = gpu_check("--cpu", "--out", "file", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert "finch: error: --out file cannot be written" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "full"])
def test_check_on_the_cpu_passes(is_quick, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # inductor takes minutes
    done = gpu_check("--cpu", *["--quick"] * is_quick, "--out", "report", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "report" / "gpu_check.json").read_text())
    statuses = {phase["title"]: phase["status"] for phase in content["phases"]}
    assert list(statuses) == [phase.title for phase in PHASES]
    left_out = {phase.title for phase in PHASES if is_quick and not phase.quick_deadline_s}
    expected = {phase.title: "not run" if phase.title in left_out else "ok" for phase in PHASES}
    assert statuses == {**expected, "machine": "measured"}
    assert not any(line["status"] == "failed" for phase in content["phases"] for line in phase["lines"])
    page = (tmp_path / "report" / "gpu_check.md").read_text()
    assert "## 5. ranks: ok" in page
