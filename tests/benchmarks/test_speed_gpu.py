"""benchmarks.speed.gpu: the model that fits, contenders that are not installed or fail, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.runs import ROOT

from benchmarks.speed import gpu as speed
from finch.plan.gpu_check.report import Check


@pytest.fixture
def check(tmp_path, monkeypatch):
    """On the CPU, with processes that find the benchmarks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "recipes"))))
    return Check("cpu", tmp_path)


@pytest.mark.parametrize(
    ("free", "expected", "skipped"),
    [
        (80e9, "Qwen3-4B", []),
        (25e9, "Qwen3-1.7B", ["Qwen3-4B"]),
        (1e9, None, ["Qwen3-4B", "Qwen3-1.7B", "Qwen3-0.6B", "Q"]),
    ],
)
def test_model_is_the_largest_that_fits(check, monkeypatch, free, expected, skipped):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(free)))
    check.device = "cuda"
    model = speed.choose_model(check, "bf16")
    assert (model and model.name) == expected
    lines = [line for line in check.lines if line.status == "not run"]
    assert [line.name for line in lines] == skipped
    for line in lines:
        remedy = "too little for any model" if line.name == "Q" else "the next smaller model is taken"
        assert line.note.endswith(f"{free / 1e9:.1f} GB are free: {remedy}")


def test_contenders_that_are_not_installed_are_named(check, monkeypatch):
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    monkeypatch.setattr(speed, "CONTENDERS", {"TRL": speed.CONTENDERS["TRL"]})
    check.quick = False
    speed.run(check)
    assert [(line.name, line.note) for line in check.lines[2:]] == [("TRL", "trl is not installed")]


@pytest.mark.slow
def test_a_contender_that_fails_is_a_failed_line_with_its_error(check, monkeypatch):
    broken = speed.Contender("torchtune", {"batch_size": "many"}, is_quick=True)
    monkeypatch.setattr(speed, "CONTENDERS", {"broken": broken})
    speed.run(check)
    [line] = check.lines[2:]
    assert (line.name, line.status) == ("broken", "failed")
    assert line.note.startswith("RuntimeError: ")


def test_tokens_of_packs_are_those_of_the_rows_that_fit():
    rows = [{"tokens": [0] * length, "labels": [0] * length} for length in (1000, 300, 100, 1300, 60)]
    assert speed._tokens_per_step(speed.CONTENDERS["torchtune, packed"], rows) == [1300, 100, 1360]


@pytest.mark.slow
def test_quick_benchmark_on_the_cpu_writes_its_page(tmp_path):
    command = [sys.executable, "-m", "benchmarks.speed.gpu", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [phase] = json.loads((tmp_path / "speed.json").read_text())["phases"]
    assert phase["status"] == "measured"
    names = {line["name"] for line in phase["lines"]}
    contenders = ("finch as shipped", "finch, compile", "torchtune, padded, compile")
    assert {"model", *(f"tiny Qwen3, {name}: tokens/s" for name in contenders)} <= names
    assert "## 0. speed: measured" in (tmp_path / "speed.md").read_text()
