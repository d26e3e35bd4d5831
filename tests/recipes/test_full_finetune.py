"""What a run of the recipe leaves behind, and torchtune's options; the shared run is a real `tune run`."""

import itertools
import math

import pytest
import torch
import yaml
from helpers.runs import llama_args, make_config, relative_l2, run_here, run_ranks, tune_run, weights
from transformers import AutoModelForCausalLM

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


def disk_logger(folder, filename):
    component = "torchtune.training.metric_logging.DiskLogger"
    return {"_component_": component, "log_dir": str(folder), "filename": filename}


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
        metric_logger=disk_logger(folder / "logs", "log.txt"),
    )
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    run = tune_run(folder, config)
    assert run.returncode == 0, run.output[-3000:]
    return run, config


def test_metrics_has_a_line_for_every_step(two_epochs):
    run, _ = two_epochs
    lines = run.metrics()
    # 41 samples, 4 per step, the short last batch kept: 11 steps per epoch
    assert [line["step"] for line in lines] == list(range(1, 23))
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
    assert again.column("loss") == run.column("loss")[:11]  # bit for bit what `tune run` gave
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


SAME_LOSSES = [
    {"enable_activation_checkpointing": "True"},
    {"ac_mode": "selective", "ac_option": "2"},
    {"loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    {"compile": "True"},
    {"num_workers": "2"},
    {"optimizer.fused": "False", "optimizer.foreach": "True"},
    {"fsdp_cpu_offload": "True", "custom_sharded_layers": "[tok_embeddings,output]"},
]
OTHER_LOSSES = [
    {"dataset.packed": "True", "epochs": "6"},
    {"dtype": "bf16"},
    {"lr_scheduler": "null", "optimizer.lr": "5e-3"},
    {"lr_scheduler.init": "first_batch"},
    {"clip_grad_norm": "null"},
    {"optimizer": "bitsandbytes.optim.PagedAdamW8bit", "~optimizer.fused": None},
]


@pytest.mark.parametrize("changes", [*SAME_LOSSES, *OTHER_LOSSES], ids=lambda changes: ",".join(changes))
def test_torchtune_options_train(changes, tmp_path, base_folder, rows_file, two_epochs, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    straight, _ = two_epochs
    config = make_config(base_folder, rows_file, tmp_path / "run")
    run = run_here(tmp_path, config, *(key if value is None else f"{key}={value}" for key, value in changes.items()))
    assert run.returncode == 0, run.output
    losses = run.column("loss")
    if changes in SAME_LOSSES:  # these change memory or speed, nothing else
        assert losses == pytest.approx(straight.column("loss")[:11], rel=1e-5)
    else:
        assert all(math.isfinite(loss) for loss in losses)
        assert sum(losses[-5:]) < sum(losses[:5])


def test_drop_last_and_no_seed(tmp_path, base_folder, rows_file):
    config = make_config(base_folder, rows_file, tmp_path / "run", drop_last=True)
    run = run_here(tmp_path, config, "seed=null")
    assert len(run.column("loss")) == 10


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
    run = run_ranks(2, tmp_path, config)
    assert run.returncode == 0, run.output[-3000:]
    assert sum(run.column("loss")[-5:]) < sum(run.column("loss")[:5])
    stored = {tensor.dtype for tensor in weights(run.folder / "epoch_0").values()}
    assert stored == {torch.float32 if dtype == "bf16_mixed" else torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(run.folder / "epoch_0").dtype == stored.pop()
