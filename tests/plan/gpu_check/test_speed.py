"""Phase 6: the model that fits, and contenders that are not installed."""

from __future__ import annotations

import pytest
import torch

from finch.plan.gpu_check import speed


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
    assert [(line.name, line.note) for line in check.lines[1:]] == [("TRL", "trl is not installed")]


@pytest.mark.slow
def test_a_contender_that_fails_is_a_failed_line_with_its_error(check, monkeypatch):
    broken = speed.Contender("torchtune", {"batch_size": "many"}, is_quick=True)
    monkeypatch.setattr(speed, "CONTENDERS", {"broken": broken})
    speed.run(check)
    [line] = check.lines[1:]
    assert (line.name, line.status) == ("broken", "failed")
    assert line.note.startswith("RuntimeError: ")


def test_tokens_of_packs_are_those_of_the_rows_that_fit():
    rows = [{"tokens": [0] * length, "labels": [0] * length} for length in (1000, 300, 100, 1300, 60)]
    assert speed._tokens_per_step(speed.CONTENDERS["torchtune, packed"], rows) == [1300, 100, 1360]
