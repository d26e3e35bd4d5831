"""benchmarks.survival.full_size: its numbers come from runs that were trained, killed and resumed; the disk decides on the model."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import ROOT

from benchmarks.speed import gpu as speed
from benchmarks.survival import full_size
from finch.plan.gpu_check.report import Check


def test_a_model_whose_saves_do_not_fit_the_disk_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(80e9), int(80e9)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=60e9))
    check = Check("cuda", tmp_path)
    assert speed.choose_model(check, "bf16", disk_factor=8).name == "Qwen3-1.7B"
    left_out, chosen = check.lines
    assert (left_out.name, left_out.status, chosen.seen) == ("Qwen3-4B", "not run", "Qwen3-1.7B")
    assert left_out.note == "needs 64.4 GB of disk, 60.0 GB are free: the next smaller model is taken"


@pytest.mark.slow
def test_a_run_is_timed_killed_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "recipes"))))
    check = Check("cpu", tmp_path)
    full_size.run(check)
    lines = {line.name: line for line in check.lines}
    assert {line.status for line in check.lines} == {"measured", "ok"}
    compared = lines["the killed and resumed run against the one without saves"]
    assert (compared.seen, compared.note) == (0, "losses of 12 steps")  # one process on a CPU: bit for bit
    assert lines["seconds from the start to the end of the first resumed step"].seen > 0
    saved = [name.rpartition(": ")[2] for name in lines if name.startswith("killed_")]
    assert "seconds to save step 3" in saved
    assert "seconds to save step 12" in saved
