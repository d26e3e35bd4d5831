"""A defect that is planted must be seen: a wrong mask, a norm in bf16, a reduction over ranks that is missing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torchtune.modules import RMSNorm

from finch.plan.gpu_check import attention, meshes, objectives, shipped, step
from finch.plan.gpu_check.plain_model import worst_loss
from finch.training import optimizer, padding_free_attention, varlen_attention

FACTORS = {
    "model": ("S", "Q"),
    "dtype": ("fp32",),
    "checkpointing": ("no checkpointing",),
    "compile": ("eager",),
    "layout": ("padded", "shared prefix"),
}


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    monkeypatch.setattr(step, "FACTORS", FACTORS)


def failed(check):
    return {line.name for line in check.lines if line.status == "failed"}


def test_covering_array_has_every_pair():
    chosen = step.covering_array(step.FACTORS)
    pairs = set()
    for (one, ones), (other, others) in itertools.combinations(step.FACTORS.items(), 2):
        pairs |= {((one, a), (other, b)) for a in ones for b in others}
    assert pairs <= {pair for case in chosen for pair in itertools.combinations(case.items(), 2)}


def test_a_right_step_passes(check):
    step.run(check)
    assert len(check.lines) == 12
    assert failed(check) == set()


def wrong_mask(monkeypatch):
    """Each token sees the one after it."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def shifted(q, k, v, mask=None, *, dropout_p=0.0, is_causal=False):
        size = q.shape[-2]
        mask = torch.ones(size, k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - size + 1)
        return attend(q, k, v, mask, dropout_p=dropout_p)

    monkeypatch.setattr(padding_free_attention, "_attend", shifted)


def test_wrong_mask_fails_the_step(check, monkeypatch):
    wrong_mask(monkeypatch)
    step.run(check)
    assert {name.rpartition(":")[0] for name in failed(check)} == {
        f"{model}, fp32, no checkpointing, eager, shared prefix" for model in "SQ"
    }


def test_wrong_mask_fails_the_attention(check, monkeypatch):
    wrong_mask(monkeypatch)
    attention.run(check)
    names = failed(check)
    assert any(name.endswith("prefix 0: per-sample loop") for name in names)
    assert any(name.endswith("prefix 27: per-sample loop") for name in names)
    assert not any("one call per layer" in name for name in names)


def test_wrong_mask_of_one_call_fails_the_attention(check, monkeypatch):
    scores = varlen_attention._scores
    monkeypatch.setattr(varlen_attention, "_scores", lambda q, k, is_causal: scores(q, k, False))
    attention.run(check)
    assert {name.partition(": ")[2] for name in failed(check)} == {"one call per layer"}


def test_bf16_norm_layer_fails_step_and_objectives(check, monkeypatch):
    def rounded(self, x):
        wide = x.bfloat16()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale).type_as(x)

    exact = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", rounded)
    step.run(check)
    assert sum(name.endswith("gradients") for name in failed(check)) == 4
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: (exact if x.dtype == torch.float64 else rounded)(self, x))
    monkeypatch.setattr(objectives, "_METHODS", ("sft", "stm"))
    check.lines.clear()
    objectives.run(check)
    assert "tiny Qwen3, sft: gradients of the last" in failed(check)


def test_bf16_gradient_norm_fails_the_step(check, monkeypatch):
    exact = optimizer.grad_norm
    monkeypatch.setattr(optimizer, "grad_norm", lambda parameters: exact(parameters).bfloat16().float())
    step.run(check)
    assert {name.rpartition(": ")[2] for name in failed(check)} == {"gradient norm"}


def test_losses_that_become_nan_fail(check, monkeypatch):
    """On all runs alike, and after a loss that is right."""
    assert math.isnan(worst_loss([1.0, math.nan], [1.0, 1.0]))
    seen = {"losses": [1.0, math.nan], "step": 0, "update": 0, "weights": 1, "seconds": 1, "busy_ms": 1, "longest": ""}

    def ranks(name, target, arguments, *_, **__):
        Path(arguments["file"]).write_text(json.dumps(seen))
        return mock.Mock()

    monkeypatch.setattr(shipped, "Ranks", ranks)
    monkeypatch.setattr(shipped, "estimate_step", lambda *_, **__: mock.Mock(peak=1, between_steps={}))
    shipped.run(check)
    runs = {f"tiny Qwen3, {ranks}: losses are finite" for ranks in ("2 ranks", "1 rank")}
    assert failed(check) == {*runs, "losses of 30 steps, several ranks against one"}


@pytest.mark.parametrize("memory", [30e9, 40e9])
def test_gpu_too_small_for_the_shipped_config_is_no_fault(check, monkeypatch, memory):
    check.device = "cuda"
    monkeypatch.setattr(shipped, "Ranks", mock.Mock(**{"return_value.last_lines.return_value": "OutOfMemoryError"}))
    monkeypatch.setattr(shipped, "estimate_step", lambda *_, **__: mock.Mock(device_peak=34e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=memory))
    shipped.run(check)
    assert failed(check) == (set() if memory < 34e9 else {"Qwen3-4B, 2 ranks", "Qwen3-4B, 1 rank"})
    assert memory > 34e9 or all("34" in line.note and "30" in line.note for line in check.lines)


@pytest.mark.slow
def test_temporary_of_the_models_size_fails_the_shipped_config(check, monkeypatch):
    monkeypatch.setattr(shipped, "RANK_TARGET", "helpers.gpu_check_phases:steps_with_a_temporary")
    monkeypatch.setattr(shipped, "_STEPS", 1)
    shipped.run(check)
    assert failed(check) == {
        f"tiny Qwen3, {ranks}: temporary memory of the update, GB" for ranks in ("2 ranks", "1 rank")
    }


@pytest.mark.slow
def test_missing_reduce_fails_the_ranks(check, monkeypatch):
    monkeypatch.setattr(meshes, "RANK_TARGET", "helpers.gpu_check_phases:steps_without_reduce")
    monkeypatch.setattr(meshes, "MESHES", {"FSDP2": {}})
    meshes._compare_meshes(check, 2)
    assert "2 ranks, FSDP2: gradients of the last" in failed(check)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_resumed(check):
    meshes.kill_a_rank(check)
    assert len(check.lines) == 2
    assert failed(check) == set()
