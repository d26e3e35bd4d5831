"""FINCH inside TorchTitan against a scalar reference, TorchTitan's own log, finch's recipe, and itself on other layouts."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.causal_lm import finch_rates, mean_loss
from helpers.runs import ROOT, finch
from helpers.titan_runs import start

from benchmarks.tiny_job import torchrun
from finch.data.rows import rows_dataset
from finch.models import auto_tokenizer

ETA_BASE, ETA_MAX, EMA = 1e-3, 2.5e-3, 0.9
ONE_RANK, LAYOUTS = ("straight", "accumulated"), ("fsdp", "hsdp", "tensor")


def largest_difference(one, other):
    """Relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def test_lr_equals_scalar_reference_and_loss_the_logged_loss(one_rank, two_ranks):
    for run in (*map(one_rank.get, ONE_RANK), *map(two_ranks.get, LAYOUTS)):
        losses, result = run.column("loss"), run.result()
        start = (run.column("ema_loss")[0] - (1 - EMA) * losses[0]) / EMA
        expected = finch_rates(losses, ETA_BASE, ETA_MAX, start)
        assert largest_difference(run.column("lr"), expected) < 1e-12
        assert largest_difference(result["rates"], expected) < 1e-6  # fp32 in the optimizer
        assert len(set(expected)) == len(expected) == 12
        steps, logged = zip(*result["logged"], strict=True)
        assert list(steps) == [line["step"] for line in run.lines()]
        assert largest_difference(losses, logged) < 1e-6


@pytest.mark.parametrize(("is_saved", "expected"), [(False, [0, 2, 2, 4, 4]), (True, [0, 2, 3, 4, 5])])
def test_steps_are_written_as_often_as_torchtitan_logs_or_saves(monkeypatch, tmp_path, is_saved, expected):
    from finch.integrations.titan.trainer import RunMetrics

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    config = SimpleNamespace(
        dump_folder=tmp_path,
        metrics=SimpleNamespace(log_freq=2),
        checkpoint=SimpleNamespace(enable=is_saved, interval=3),
        training=SimpleNamespace(steps=5),
    )
    metrics = RunMetrics(SimpleNamespace(config=config), None)
    metrics.open(0)
    line = {"loss": torch.tensor(2.0), "lr": 1e-5, "lr_is_capped": False, "num_target_tokens": torch.tensor(3)}
    found = []
    for step in range(1, 6):
        metrics.add_step(step, line)
        found.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert found == expected


def test_differences_are_named(titan_configs):
    from finch.integrations.titan.recipe_config import _differences

    trainer = SimpleNamespace(
        config=titan_configs.finch(),
        dataloader=SimpleNamespace(rounds_per_epoch=8),
        gradient_accumulation_steps=2,
        model_parts=[torch.nn.Linear(1, 1)],
    )
    assert list(_differences(trainer, 2)) == ["It takes whole epochs."]
    trainer.gradient_accumulation_steps = 3
    trainer.model_parts[0].bias.requires_grad_(False)
    assert [line.split(";")[0] for line in _differences(trainer, 2)] == [
        "It takes whole epochs.",
        "Its steps end with the epoch",
        "It trains all weights, of which some are frozen here.",
    ]


def test_fused_optimizer_steps_on_local_shards(titan_configs, monkeypatch):
    """Without that a step makes a tensor of the complete model's size, as tests/training/test_optimizer.py shows."""
    from finch.integrations.titan import lr_scheduler

    changed, config = [], titan_configs.finch()
    monkeypatch.setattr(lr_scheduler, "on_local_shards", changed.append)
    optimizers = config.optimizer.build(model_parts=[torch.nn.Linear(2, 2)])
    config.lr_scheduler.build(optimizers=optimizers, training_steps=4)
    assert changed == list(optimizers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rates_equal_the_recipes(one_rank, two_ranks, recipe_runs, ranks):
    expected = recipe_runs["straight"]
    for run in map(one_rank.get, ONE_RANK) if ranks == 1 else map(two_ranks.get, LAYOUTS):
        assert largest_difference(run.column("lr"), expected.column("lr")[:12]) < 1e-6
        assert largest_difference(run.column("loss"), expected.column("loss")[:12]) < 5e-6
        assert run.column("num_target_tokens") == expected.column("num_target_tokens")[:12]


def test_losses_of_the_page_are_those_of_the_runs(one_rank, two_ranks, recipe_runs):
    runs = recipe_runs["straight"], one_rank["straight"], two_ranks["fsdp"], two_ranks["tensor"]
    page = (ROOT / "docs/titan.md").read_text().split("loss: recipe")[1].split("```")[0]
    rows = [[float(cell) for cell in line.split()] for line in page.splitlines()[1:]]
    assert len(rows) == 5
    for step, rate, *losses in rows:
        index = int(step) - 1
        assert rate == pytest.approx(runs[0].column("lr")[index], rel=1e-6)
        assert losses == pytest.approx([run.column("loss")[index] for run in runs], rel=1e-6)


@pytest.mark.parametrize("objective", ["dft", "eaft", "talr"])
def test_objective_equals_the_recipes(one_rank, recipe_runs, objective):
    run, expected = one_rank[objective], recipe_runs[objective]
    for name, tolerance in (("lr", 1e-6), ("loss", 5e-6), ("grad_norm", 1e-4)):
        assert largest_difference(run.column(name), expected.column(name)) < tolerance, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_continues_bit_for_bit(one_rank, two_ranks, ranks):
    straight = one_rank["straight"] if ranks == 1 else two_ranks["fsdp"]
    resumed = (one_rank if ranks == 1 else two_ranks)["resumed"]
    for name in ("step", "loss", "ema_loss", "lr", "grad_norm"):
        assert resumed.column(name) == straight.column(name), name
    one, other = straight.weights(), resumed.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_run_continues_on_another_number_of_ranks(one_rank, two_ranks):
    straight, run = one_rank["straight"], two_ranks["resharded"]
    assert run.column("step") == list(range(1, 13))
    for name, tolerance in (("lr", 1e-6), ("loss", 5e-6), ("grad_norm", 1e-4)):
        assert largest_difference(run.column(name), straight.column(name)) < tolerance, name


def test_run_of_another_scheduler_continues_with_finch(one_rank):
    run = one_rank["other"]
    assert run.column("step") == [3, 4, 5, 6]
    expected = finch_rates(run.column("loss"), ETA_BASE, ETA_MAX, None)
    assert largest_difference(run.column("lr"), expected) < 1e-12
    assert largest_difference(run.result()["rates"], run.column("lr")) < 1e-6


def test_nonfinite_steps_are_skipped(one_rank, two_ranks):
    for run, skipped in (
        (one_rank["skipped"], {3, 5}),
        (two_ranks["skipped"], {3}),
        (two_ranks["tensor_skipped"], {3}),
    ):
        ema, losses = run.column("ema_loss"), run.column("loss")
        assert {step for step, loss in enumerate(losses, 1) if loss is None} == skipped
        assert all(ema[step - 1] == ema[step - 2] for step in skipped)
        assert all(value.isfinite().all() for value in run.weights().values())


def test_nonfinite_gradient_ends_the_run(one_rank):
    assert "not finite" in one_rank["raised_late"].result()["error"]
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
    tokenizer = auto_tokenizer(str(shared_data / "stories260k"), max_seq_len=128)
    rows = rows_dataset(tokenizer, data_files=str(shared_data / "tofu/full.jsonl"), split="train[64:73]")
    rows = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows]
    exported = run.folder / f"checkpoint/step-{last}"
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert losses[last] == pytest.approx(mean_loss(model, rows), rel=1e-5)


def test_last_model_is_that_of_its_epoch_and_answers_as_trained(one_rank, shared_data):
    folder = one_rank["validated"].folder
    expected = auto_tokenizer(str(shared_data / "stories260k")).chat_template
    assert transformers.AutoTokenizer.from_pretrained(folder / "epoch_0").chat_template == expected
    assert (folder / "epoch_0").resolve() == folder / "checkpoint/step-4"


@pytest.mark.slow
def test_commands_take_its_folder(validated, shared_data, tmp_path, capsys):
    run = str(validated.folder.rename(tmp_path / "run"))
    rows = ("--tasks", "tofu", "--limit", "3", "--data-root", str(shared_data), "--out", str(tmp_path / "scores"))
    for command in (
        ("chat", run, "--prompt", "Once upon a time", "--max-new-tokens", "8"),
        ("average", run),
        ("report", run, "--out", str(tmp_path / "report")),
        ("evaluate", "--base", str(shared_data / "stories260k"), "--tuned", run, *rows),
    ):
        code, out, err = finch(capsys, *command)
        assert code == 0, out + err
    assert (tmp_path / "run/average/model/config.json").is_file()
    assert (tmp_path / "report/report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["--parallelism.spmd_backend", "full_dtensor"], "parallelism.spmd_backend=full_dtensor is not supported"),
        (["--dataloader.data_files", "none.jsonl"], "data_files=none.jsonl"),  # found within TorchTitan's trainer
    ],
)
def test_mistake_is_one_line(setting, message, shared_data, tmp_path):
    arguments = ["--module", "helpers.titan_configs", "--config", "finch", "--dump_folder", str(tmp_path), *setting]
    done = start(torchrun(1, "-m", "helpers.titan_cpu", *arguments), shared_data)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "finch: error" in line]
    assert len(lines) == 1, done.stdout[-3000:]
    assert lines[0].startswith(f"finch: error: {message}")
    assert "UserError" not in done.stdout
