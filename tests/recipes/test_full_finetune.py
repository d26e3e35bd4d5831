"""The recipe through the real `tune run`, in one process and in two."""

import itertools
import json
import math
import shutil

import pytest
import torch
import yaml
from helpers.runs import llama_args, make_config, relative_l2, run_here, tune_run, weights
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow

METRICS = {
    "step",
    "epoch",
    "loss",
    "ema_loss",
    "lr",
    "lr_is_capped",
    "eta_sqrt_loss",
    "grad_norm",
    "num_target_tokens",
    "tokens_per_second_per_gpu",
}


def largest_difference(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory, base_folder, rows_file):
    """One run that several tests look at: one process, two epochs, validation, a logger."""
    folder = tmp_path_factory.mktemp("two_epochs")
    config = make_config(
        base_folder,
        rows_file,
        folder / "run",
        epochs=2,
        validate_every_n_steps=4,
        metric_logger={
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "logs"),
            "filename": "log.txt",
        },
    )
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    run = tune_run(folder, config)
    assert run.returncode == 0, run.output[-3000:]
    return run, config


def test_metrics_has_a_line_for_every_step(two_epochs):
    run, _ = two_epochs
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(
        range(1, 23)
    )  # 41 samples, 4 a step, the short last batch kept: 11 steps an epoch
    assert all(set(line) == METRICS for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    logged = (run.folder.parent / "logs" / "log.txt").read_text().splitlines()
    assert len([line for line in logged if "ema_loss" in line]) == len(lines)
    assert "dtype fp32: weights, optimizer states and computation in fp32" in run.output


def test_lr_follows_the_equation_of_the_logged_losses(two_epochs):
    run, _ = two_epochs
    average = float(run.output.split("training samples: ")[1].split(" nats")[0])
    lines = run.metrics()
    # The printed initial loss has four decimals; from the first line on the recursion is checked to the last digit.
    assert lines[0]["ema_loss"] == pytest.approx(0.9 * average + 0.1 * lines[0]["loss"], abs=1e-4)
    for past, line in itertools.pairwise(lines):
        assert line["ema_loss"] == pytest.approx(0.9 * past["ema_loss"] + 0.1 * line["loss"], rel=1e-12)
        assert line["lr"] == pytest.approx(min(2e-3 / math.sqrt(line["ema_loss"] + 1e-8), 5e-3), rel=1e-12)
        assert line["eta_sqrt_loss"] == pytest.approx(line["lr"] * math.sqrt(line["loss"]), rel=1e-12)


def test_saved_config_repeats_the_run_in_another_folder(two_epochs, tmp_path):
    run, _ = two_epochs
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    again = run_here(tmp_path, {**saved, "epochs": 1, "output_dir": str(tmp_path / "again")})
    assert again.returncode == 0, again.output
    assert again.column("loss") == run.column("loss")[:11]
    assert saved["checkpointer"]["output_dir"] == "${output_dir}"


def test_epoch_folder_loads_in_transformers_with_equal_logits(two_epochs, base_folder):
    from torchtune.models.llama2 import llama2

    from finch.weights.huggingface import HuggingFaceFolder

    run, _ = two_epochs
    for epoch in range(2):
        folder = run.folder / f"epoch_{epoch}"
        assert {"config.json", "model.safetensors", "tokenizer.model", "generation_config.json"} <= {
            path.name for path in folder.iterdir()
        }
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        result = llama2(**llama_args()).eval()
        result.load_state_dict(dict(HuggingFaceFolder(str(folder)).weights()))
        tokens = torch.arange(24).view(2, 12) % 64
        with torch.no_grad():
            torch.testing.assert_close(result(tokens), reference(tokens).logits, rtol=0, atol=1e-5)
    assert relative_l2(weights(run.folder / "epoch_1"), weights(base_folder)) > 1e-3


def test_best_links_the_lowest_validation_loss(two_epochs):
    run, _ = two_epochs
    validated = run.metrics(validation=True)
    assert [line["step"] for line in validated] == [4, 8, 11, 12, 16, 20, 22]
    ends = {0: validated[2]["validation_loss"], 1: validated[6]["validation_loss"]}
    best = min(ends, key=ends.get)
    assert (run.folder / "best").readlink().name == f"epoch_{best}"
    assert (run.folder / "best" / "config.json").is_file()


def test_resume_after_an_epoch_is_bitwise(two_epochs, tmp_path):
    """Kill between epochs: resumed weights, losses and learning rates are bitwise those of the straight run."""
    straight, config = two_epochs
    config = {**config, "output_dir": str(tmp_path / "run"), "epochs": 1}
    assert run_here(tmp_path, config).returncode == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, "loss": 0.0}) + "\n")  # a step of an attempt that was not saved
    resumed = run_here(tmp_path, {**config, "epochs": 2, "resume_from_checkpoint": True})
    assert resumed.returncode == 0, resumed.output
    assert "resumed from step 11" in resumed.output
    for name in ("loss", "ema_loss", "lr", "grad_norm"):
        assert resumed.column(name) == straight.column(name)
    one, other = weights(resumed.folder / "epoch_1"), weights(straight.folder / "epoch_1")
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("schedule", ["finch", "cosine"])
def test_resume_without_step_checkpoints_repeats_the_epoch(
    schedule, two_epochs, tmp_path, base_folder, rows_file, monkeypatch
):
    import finch_full_finetune

    straight, config = two_epochs
    if schedule == "cosine":
        cosine = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 3,
        }
        config = make_config(base_folder, rows_file, tmp_path / "straight", epochs=2, lr_scheduler=cosine)
        straight = run_here(tmp_path, config)
    config = {**config, "output_dir": str(tmp_path / "run")}
    train_step = finch_full_finetune.FinchFullFinetune._train_step

    def stopped(recipe, batches):
        if recipe.state.step == 15:
            raise KeyboardInterrupt
        train_step(recipe, batches)

    with monkeypatch.context() as patch:
        patch.setattr(finch_full_finetune.FinchFullFinetune, "_train_step", stopped)
        assert run_here(tmp_path, config).returncode == 130
    resumed = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert "resumed from step 11" in resumed.output
    for name in ("loss", "lr", "grad_norm"):
        assert resumed.column(name) == straight.column(name)
    assert weights(resumed.folder / "epoch_1").keys() == weights(straight.folder / "epoch_1").keys()
    assert relative_l2(weights(resumed.folder / "epoch_1"), weights(straight.folder / "epoch_1")) == 0
    again = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert "nothing to do" in again.output
    assert len(again.metrics()) == 22


def test_two_ranks_equal_one_and_resume_each_other(tmp_path, two_epochs):
    straight, straight_config = two_epochs
    config = {**straight_config, "output_dir": str(tmp_path / "run"), "batch_size": 2, "debug_checks": True}
    run = tune_run(tmp_path, config, ranks=2)
    assert run.returncode == 0, run.output[-3000:]
    assert "2 ranks on cpu" in run.output
    for name in ("loss", "ema_loss", "lr"):
        assert largest_difference(run.column(name), straight.column(name)) < 2e-6
    assert run.column("num_target_tokens") == straight.column("num_target_tokens")
    assert relative_l2(weights(run.folder / "epoch_1"), weights(straight.folder / "epoch_1")) < 1e-5

    # A run of one process goes on with two ranks as it would have gone on alone.
    alone = run_here(tmp_path, {**straight_config, "output_dir": str(tmp_path / "alone"), "epochs": 3})
    moved = {**config, "output_dir": str(tmp_path / "moved"), "resume_from_checkpoint": True, "epochs": 3}
    shutil.copytree(straight.folder, tmp_path / "moved", symlinks=True)
    continued = tune_run(tmp_path / "again", moved, ranks=2)
    assert continued.returncode == 0, continued.output[-3000:]
    assert "resumed from step 22" in continued.output
    assert len(continued.column("loss")) == 33
    assert largest_difference(continued.column("loss"), alone.column("loss")) < 2e-6
    assert relative_l2(weights(continued.folder / "epoch_2"), weights(alone.folder / "epoch_2")) < 1e-5

    # And the other way: what two ranks saved goes on in one process.
    back = run_here(
        tmp_path, {**straight_config, "output_dir": str(run.folder), "epochs": 3}, "resume_from_checkpoint=True"
    )
    assert back.returncode == 0, back.output
    assert largest_difference(back.column("loss"), alone.column("loss")) < 2e-6


def test_sft_equals_the_stock_single_device_recipe(tmp_path, base_folder, rows_file):
    """Same loss curve as torchtune's own recipe, cosine schedule and accumulation included, on rows that fill every batch."""
    schedule = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 3,
    }
    loss = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    changes = {"lr_scheduler": schedule, "loss": loss, "batch_size": 4, "gradient_accumulation_steps": 2, "epochs": 2}
    config = make_config(base_folder, rows_file, tmp_path / "run", **changes)
    config["dataset"]["split"] = "train[:40]"
    config.update(resume_from_checkpoint=False, shuffle=True, max_steps_per_epoch=None)
    result = run_here(tmp_path, config)
    assert result.returncode == 0, result.output
    logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(tmp_path),
        "filename": "stock.txt",
    }
    stock = {
        **config,
        "output_dir": str(tmp_path / "stock"),
        "optimizer_in_bwd": False,
        "compile": False,
        "metric_logger": logger,
    }
    run = tune_run(tmp_path / "stock_run", stock, recipe="full_finetune_single_device")
    assert run.returncode == 0, run.output[-3000:]
    lines = [line for line in (tmp_path / "stock.txt").read_text().splitlines() if "loss:" in line]
    reference = [float(line.split("loss:")[1].split()[0]) for line in lines]
    assert len(reference) == 10
    assert result.column("loss") == pytest.approx(reference, rel=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset.packed": "True", "epochs": "6"},
        {"enable_activation_checkpointing": "True"},
        {"ac_mode": "selective", "ac_option": "2"},
        {"loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        {"compile": "True"},
        {"dtype": "bf16"},
        {"num_workers": "2"},
        {"lr_scheduler": "null", "optimizer.lr": "5e-3"},
        {"lr_scheduler.init": "first_batch"},
        {"clip_grad_norm": "null"},
        {"optimizer.fused": "False", "optimizer.foreach": "True"},
        {"drop_last": "True", "seed": "null"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_torchtune_options_train(changes, tmp_path, base_folder, rows_file, two_epochs, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    straight, _ = two_epochs
    config = make_config(base_folder, rows_file, tmp_path / "run")
    run = run_here(tmp_path, config, *(f"{key}={value}" for key, value in changes.items()))
    assert run.returncode == 0, run.output
    losses = run.column("loss")
    if set(changes) & {
        "enable_activation_checkpointing",
        "ac_mode",
        "compile",
        "loss._component_",
        "num_workers",
        "optimizer.fused",
    }:
        assert losses == pytest.approx(
            straight.column("loss")[: len(losses)], rel=1e-5
        )  # these change memory or speed, nothing else
    elif "drop_last" in changes:
        assert len(losses) == 10
    else:
        assert all(math.isfinite(loss) for loss in losses)
        assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("optimizer", ["bitsandbytes.optim.PagedAdamW8bit", "torchao.optim.AdamW8bit"])
def test_8_bit_optimizer_resumes(optimizer, tmp_path, base_folder, rows_file, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its optimizer; a test machine may lack a compiler
    model = {"_component_": "torchtune.models.llama2.llama2", **llama_args(embed_dim=64, intermediate_dim=256)}
    base = tmp_path / "base"
    shutil.copytree(base_folder, base)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(base, hidden_size=64, intermediate_size=256, head_dim=16)
    LlamaForCausalLM(config).save_pretrained(base)  # large enough for states in blocks of 8 bits
    changes = {"optimizer": {"_component_": optimizer, "lr": 2e-3}, "model": model, "epochs": 2}
    config = make_config(base, rows_file, tmp_path / "straight", **changes)
    straight = run_here(tmp_path, config)
    assert straight.returncode == 0, straight.output
    config["output_dir"] = str(tmp_path / "run")
    assert run_here(tmp_path, config, "epochs=1").returncode == 0
    resumed = run_here(tmp_path, config, "resume_from_checkpoint=True")
    assert resumed.returncode == 0, resumed.output
    assert resumed.column("loss") == straight.column("loss")


def test_profiler_writes_a_trace(tmp_path, base_folder, rows_file):
    profiler = {
        "_component_": "torchtune.training.setup_torch_profiler",
        "enabled": True,
        "cpu": True,
        "cuda": False,
        "xpu": False,
        "output_dir": str(tmp_path / "trace"),
        "wait_steps": 1,
        "warmup_steps": 1,
        "active_steps": 1,
        "num_cycles": 1,
    }
    run = run_here(
        tmp_path, make_config(base_folder, rows_file, tmp_path / "run", profiler=profiler, max_steps_per_epoch=4)
    )
    assert run.returncode == 0, run.output
    assert list((tmp_path / "trace").rglob("*.json*"))


@pytest.mark.parametrize("dtype", ["bf16_mixed", "bf16_stochastic"])
def test_mixed_and_stochastic_precision_on_two_ranks(dtype, tmp_path, base_folder, rows_file, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its optimizer; a test machine may lack a compiler
    config = make_config(base_folder, rows_file, tmp_path / "run", dtype=dtype, batch_size=2)
    run = tune_run(tmp_path, config, ranks=2)
    assert run.returncode == 0, run.output[-3000:]
    assert sum(run.column("loss")[-5:]) < sum(run.column("loss")[:5])
    stored = {tensor.dtype for tensor in weights(run.folder / "epoch_0").values()}
    assert stored == {torch.float32 if dtype == "bf16_mixed" else torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(run.folder / "epoch_0").dtype == stored.pop()


def test_cpu_offload_with_custom_sharded_layers(tmp_path, base_folder, rows_file, two_epochs):
    straight, _ = two_epochs
    config = make_config(
        base_folder,
        rows_file,
        tmp_path / "run",
        fsdp_cpu_offload=True,
        custom_sharded_layers=["tok_embeddings", "output"],
    )
    run = run_here(tmp_path, config)
    assert run.returncode == 0, run.output
    assert run.column("loss") == pytest.approx(straight.column("loss")[:11], rel=1e-5)
