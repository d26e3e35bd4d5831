"""FINCH inside TorchTitan against a scalar reference, TorchTitan's own log, finch's recipe, and itself on other layouts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.runs import run_here
from helpers.titan_runs import start

from finch.data.rows import rows_dataset
from finch.models import auto_tokenizer

ETA_BASE, ETA_MAX, EMA, EPS = 1e-3, 2.5e-3, 0.9, 1e-8
LAYOUTS = ("fsdp", "hsdp", "tensor")


def largest_difference(one, other):
    """Relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def reference_rates(losses, start):
    """Section 3.3's formula in plain Python."""
    rates, average = [], start
    for loss in losses:
        average = EMA * average + (1 - EMA) * loss
        rates.append(min(ETA_BASE / math.sqrt(average + EPS), ETA_MAX))
    return rates


@pytest.fixture(scope="session")
def recipe_runs(tmp_path_factory, shared_data):
    """finch's torchtune recipe on the same rows, with cross-entropy and with each objective that TorchTitan's loss can be."""
    folder, base = tmp_path_factory.mktemp("recipe"), shared_data / "stories260k"
    model = {"vocab_size": 512, "num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 64}
    model |= {"max_seq_len": 512, "intermediate_dim": 172, "norm_eps": 1e-5}
    config = {
        "model": {"_component_": "torchtune.models.llama2.llama2", **model},
        "tokenizer": {"_component_": "finch.models.auto_tokenizer", "path": str(base), "max_seq_len": 128},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": "unused",
            "model_type": "LLAMA2",
        },
        "dataset": {
            "_component_": "finch.data.rows.rows_dataset",
            "data_files": str(shared_data / "tofu/full.jsonl"),
            "split": "train[:64]",
        },
        "seed": 0,
        "batch_size": 8,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": ETA_BASE, "weight_decay": 0.0, "fused": True},
        "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": ETA_MAX, "init": "dataset"},
        "clip_grad_norm": 1.0,
        "device": "cpu",
        "dtype": "fp32",
    }
    runs = {}
    for name, loss, epochs, steps in (
        ("straight", {"_component_": "torch.nn.CrossEntropyLoss"}, 3, None),
        ("dft", {"_component_": "finch.objectives.DFT"}, 1, 4),
        ("eaft", {"_component_": "finch.objectives.EAFT"}, 1, 4),
        ("talr", {"_component_": "finch.objectives.TALR", "tau": 2.0}, 1, 4),
    ):
        run = {**config, "output_dir": str(folder / name), "loss": loss, "epochs": epochs, "max_steps_per_epoch": steps}
        runs[name] = run_here(folder / name, run)
        assert runs[name].returncode == 0, runs[name].output[-3000:]
    return runs


def test_lr_equals_scalar_reference(one_rank, two_ranks):
    for run in (one_rank["straight"], one_rank["accumulated"], *(two_ranks[name] for name in LAYOUTS)):
        losses = run.column("loss")
        start = (run.column("ema_loss")[0] - (1 - EMA) * losses[0]) / EMA
        expected = reference_rates(losses, start)
        assert largest_difference(run.column("lr"), expected) < 1e-12
        assert largest_difference(run.result()["rates"], expected) < 1e-6  # fp32 in the optimizer
        assert len(set(expected)) == len(expected) == 20


def test_loss_equals_the_logged_loss(one_rank, two_ranks):
    for run in (one_rank["straight"], one_rank["accumulated"], *(two_ranks[name] for name in LAYOUTS)):
        steps, logged = zip(*run.result()["logged"], strict=True)
        assert list(steps) == [line["step"] for line in run.lines()]
        assert largest_difference(run.column("loss"), logged) < 1e-6


def test_steps_are_written_as_often_as_torchtitan_logs(monkeypatch, tmp_path):
    from finch.titan.trainer import RunMetrics

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    config = SimpleNamespace(dump_folder=tmp_path, metrics=SimpleNamespace(log_freq=2))
    metrics = RunMetrics(SimpleNamespace(config=config), None)
    metrics.open(0)
    line = {"loss": torch.tensor(2.0), "lr": 1e-5, "lr_is_capped": False, "num_target_tokens": torch.tensor(3)}
    found = []
    for step in range(1, 6):
        metrics.add_step(step, line)
        found.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert found == [0, 2, 2, 4, 4]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rates_equal_the_recipes(one_rank, two_ranks, recipe_runs, ranks):
    expected = recipe_runs["straight"]
    runs = (one_rank["straight"], one_rank["accumulated"]) if ranks == 1 else [two_ranks[name] for name in LAYOUTS]
    for run in runs:
        differences = {
            name: largest_difference(run.column(name), expected.column(name)[:20])
            for name in ("lr", "loss", "ema_loss", "grad_norm")
        }
        assert differences["lr"] < 1e-6
        assert differences["loss"] < 5e-6
        assert run.column("num_target_tokens") == expected.column("num_target_tokens")[:20]


@pytest.mark.parametrize("objective", ["dft", "eaft", "talr"])
def test_objective_equals_the_recipes(one_rank, recipe_runs, objective):
    run, expected = one_rank[objective], recipe_runs[objective]
    for name, tolerance in (("lr", 1e-6), ("loss", 5e-6), ("grad_norm", 1e-4)):
        assert largest_difference(run.column(name), expected.column(name)) < tolerance, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_continues_bit_for_bit(one_rank, two_ranks, ranks):
    straight, resumed = (
        (one_rank["straight"], one_rank["resumed"]) if ranks == 1 else (two_ranks["fsdp"], two_ranks["resumed"])
    )
    for name in ("step", "loss", "ema_loss", "lr", "grad_norm"):
        assert resumed.column(name) == straight.column(name), name
    one, other = straight.weights(), resumed.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_run_of_another_scheduler_continues_with_finch(one_rank):
    run = one_rank["other"]
    assert run.column("step") == [3, 4, 5, 6]
    losses = run.column("loss")
    assert largest_difference(run.column("lr"), reference_rates(losses, losses[0])) < 1e-12
    assert largest_difference(run.result()["rates"], run.column("lr")) < 1e-6


def test_nonfinite_steps_are_skipped(one_rank, two_ranks):
    run = one_rank["skipped"]
    ema, losses = run.column("ema_loss"), run.column("loss")
    assert [loss is None for loss in losses] == [False, False, True, False, True, False]
    assert ema[2] == ema[1]
    assert ema[4] == ema[3]
    assert all(value.isfinite().all() for value in run.weights().values())
    for name in ("skipped", "tensor_skipped"):
        run = two_ranks[name]
        assert [loss is None for loss in run.column("loss")] == [False, False, True, False], name
        assert all(value.isfinite().all() for value in run.weights().values()), name


def test_nonfinite_gradient_ends_the_run(one_rank):
    run = one_rank["raised"]
    assert "not finite" in run.result()["error"]
    assert run.column("step")[-1] == 3
    assert all(value.isfinite().all() for value in run.weights().values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_loss_is_the_exported_folders(one_rank, two_ranks, shared_data, ranks):
    """Against transformers on the folder of the last step: 9 rows, an odd number, and no padding."""
    run = (one_rank if ranks == 1 else two_ranks)["validated"]
    losses = {line["step"]: line["validation_loss"] for line in run.lines() if "validation_loss" in line}
    last = run.column("step")[-1]
    assert list(losses) == ([1, 2, 4] if ranks == 1 else [1, 2])
    base = str(shared_data / "stories260k")
    rows = rows_dataset(
        auto_tokenizer(base, max_seq_len=128), data_files=str(shared_data / "tofu/full.jsonl"), split="train[64:73]"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run.folder / f"checkpoint/step-{last}", dtype=torch.float32
    )
    loss_sum, num_targets = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["tokens"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        loss_sum += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        num_targets += int((labels != -100).sum())
    assert losses[last] == pytest.approx(loss_sum / num_targets, rel=1e-5)


def test_mistake_is_one_line(shared_data, tmp_path):
    arguments = ["--module", "helpers.titan_configs", "--config", "finch", "--dump_folder", str(tmp_path)]
    done = start(1, [*arguments, "--parallelism.spmd_backend", "full_dtensor"], shared_data)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "finch: error" in line]
    assert len(lines) == 1, done.stdout[-3000:]
    assert lines[0].startswith("finch: error: parallelism.spmd_backend=full_dtensor is not supported")
    assert "UserError" not in done.stdout
