"""What a run of the recipe leaves behind, and torchtune's options; the shared run is a real `tune run`."""

import math

import finch_full_finetune
import pytest
import torch
import yaml
from helpers.causal_lm import mean_loss
from helpers.runs import (
    before_steps,
    disk_logger,
    finished,
    llama_args,
    make_config,
    relative_l2,
    tune_run,
    validated,
    weights,
)
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finch.config.instantiate import build
from finch.training import hooks
from finch.training.metrics import MetricsLog
from finch.training.step_loss import StepLoss

METRICS = {
    "step",
    "epoch",
    "loss",
    "ema_loss",
    "lr",
    "lr_is_capped",
    "eta_sqrt_loss",
    "eta_sqrt_loss_sum",
    "grad_norm",
    "num_target_tokens",
}


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory, base_folder, rows_file):
    """A run that several tests look at: one process, two epochs, validation, a logger."""
    folder = tmp_path_factory.mktemp("two_epochs")
    logger = disk_logger(folder / "logs", filename="log.txt")
    changes = {"epochs": 2, "validate_every_n_steps": 4, "metric_logger": logger}
    run = tune_run(folder, validated(make_config(base_folder, rows_file, folder / "run", **changes)))
    assert run.returncode == 0, run.output[-3000:]
    return run


def test_metrics_has_a_line_for_every_step(two_epochs):
    run, lines = two_epochs, two_epochs.metrics()
    # 41 samples, 4 per step, the short last batch kept: 11 steps per epoch
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert all(set(line) == METRICS | {"tokens_per_second_per_gpu"} for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    logged = (run.folder.parent / "logs" / "log.txt").read_text().splitlines()
    assert len([line for line in logged if "ema_loss" in line]) == len(lines)
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "dtype fp32: weights, optimizer states and computation in fp32" in run.output


def test_metrics_follow_the_printed_initial_loss(two_epochs):
    average = float(two_epochs.output.split("training samples: ")[1].split(" nats")[0])
    lines = two_epochs.metrics()
    # The printed initial loss has four decimals; the recursion to the last digit: test_layouts.py.
    assert lines[0]["ema_loss"] == pytest.approx(0.9 * average + 0.1 * lines[0]["loss"], abs=1e-4)
    for line in lines:
        assert line["eta_sqrt_loss"] == pytest.approx(line["lr"] * math.sqrt(line["loss"]), rel=1e-12)


def test_saved_config_repeats_the_run_in_another_folder(two_epochs, tmp_path):
    run = two_epochs
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    again = finished(tmp_path, {**saved, "epochs": 1})
    assert again.column("loss") == run.column("loss")[:11]  # bit for bit what `tune run` gave
    assert saved["checkpointer"]["output_dir"] == "${output_dir}"


def test_epoch_folder_loads_in_transformers_with_equal_logits(two_epochs, base_folder):
    from torchtune.models.llama2 import llama2

    from finch.weights.huggingface import HuggingFaceFolder

    run = two_epochs
    for epoch in range(2):
        folder = run.folder / f"epoch_{epoch}"
        assert {"tokenizer.model", "generation_config.json"} <= {path.name for path in folder.iterdir()}
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        result = llama2(**llama_args()).eval()
        result.load_state_dict(dict(HuggingFaceFolder(str(folder)).weights()))
        tokens = torch.arange(24).view(2, 12) % 64
        with torch.no_grad():
            torch.testing.assert_close(result(tokens), reference(tokens).logits, rtol=0, atol=1e-5)
    assert relative_l2(weights(run.folder / "epoch_1"), weights(base_folder)) > 1e-3


def test_validation_begins_with_the_pretrained_model_and_chooses_the_best_epoch(two_epochs, base_folder):
    run = two_epochs
    losses = {line["step"]: line["validation_loss"] for line in run.metrics(validation=True)}
    assert list(losses) == [0, 4, 8, 11, 12, 16, 20, 22]
    cfg = OmegaConf.load(run.folder / "config.yaml")
    rows = build(cfg.dataset_validation, "dataset_validation", build(cfg.tokenizer, "tokenizer"))
    rows = [{"input_ids": list(row["tokens"]), "labels": list(row["labels"])} for row in rows]
    assert losses[0] == pytest.approx(mean_loss(AutoModelForCausalLM.from_pretrained(base_folder), rows), rel=1e-5)
    best = min((0, 1), key=lambda epoch: losses[(11, 22)[epoch]])
    assert (run.folder / "best").readlink().name == f"epoch_{best}"


SAME_LOSSES = [
    ("enable_activation_checkpointing=True",),
    ("ac_mode=selective", "ac_option=2"),
    ("loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss",),
    ("compile=True",),
    ("num_workers=2",),
    ("optimizer.fused=False", "optimizer.foreach=True"),
    ("fsdp_cpu_offload=True", "custom_sharded_layers=[tok_embeddings,output]"),
]
OTHER_LOSSES = [
    ("dataset.packed=True", "epochs=6"),
    ("dtype=bf16",),
    ("lr_scheduler=null", "optimizer.lr=5e-3"),
    ("lr_scheduler.init=first_batch",),
    ("optimizer=bitsandbytes.optim.PagedAdamW8bit", "~optimizer.fused"),
]


@pytest.mark.parametrize("changes", [*SAME_LOSSES, *OTHER_LOSSES], ids=",".join)
def test_torchtune_options_train(changes, tmp_path, tiny, two_epochs, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # a test machine may lack a C++ compiler
    losses = finished(tmp_path, tiny(), *changes).column("loss")
    if changes in SAME_LOSSES:  # these change memory or speed, nothing else
        assert losses == pytest.approx(two_epochs.column("loss")[:11], rel=1e-5)
    else:
        assert sum(losses[-5:]) < sum(losses[:5])


def test_updates_that_bf16_rounds_away_are_said_at_the_start(tmp_path, tiny, base_folder):
    """Their share is that of the pretrained weights, over all ranks; a resumed run does not say it again."""
    config, weights = tiny(epochs=1), load_file(base_folder / "model.safetensors").values()
    values = torch.cat([each.bfloat16().flatten() for each in weights]).tolist()
    share = sum(2.0 ** (math.floor(math.log2(abs(each))) - 8) > 1e-5 for each in values) / len(values)
    text = f"optimizer.lr=1e-05: in bf16 {share:.0%} of the weights are so large that an update of this size is rounded away"
    started, resumed, *others = (
        finished(tmp_path, config, "optimizer.lr=1e-5", *changes, ranks=2).output
        for changes in (
            ["dtype=bf16"],
            ["dtype=bf16", "epochs=2", "resume_from_checkpoint=True"],
            ["dtype=bf16_mixed", "overwrite=True"],
            ["dtype=bf16", "optimizer._component_=torch.optim.SGD", "overwrite=True"],  # its update is the gradient's
        )
    )
    assert started.count(text) == 1
    assert "resumed from step" in resumed
    assert "rounded away" not in resumed + "".join(others)


def test_next_batch_is_fetched_before_a_step_is_read(tmp_path, tiny, two_epochs, monkeypatch):
    """As on a GPU, where metrics are read one report late, which changes none of them; nor do they change in a run that is resumed."""
    done = []

    class Fetching(StepLoss):
        def steps(self, *args):
            for batches in super().steps(*args):
                done.append("fetch")
                yield batches

    class Late(MetricsLog):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "is_late": True})

        def report(self):
            done.append("read")
            super().report()

    monkeypatch.setattr(finch_full_finetune, "StepLoss", Fetching)
    monkeypatch.setattr(hooks, "MetricsLog", Late)
    before_steps(monkeypatch, lambda _: done.append("step"))
    config = tiny(checkpoint={"every_n_steps": 3, "keep_last": 9})
    run = finished(tmp_path, config, "epochs=1")
    assert done == ["fetch", *["step", "fetch", "read"] * 10, "step", "read"]
    resumed = finished(tmp_path, config, "epochs=1", f"resume_from_checkpoint={run.folder / 'checkpoints/step_6'}")
    assert "resumed from step 6" in resumed.output
    for column in ("loss", "lr", "grad_norm", "num_target_tokens"):
        assert resumed.column(column) == two_epochs.column(column)[:11]


def test_drop_last_and_a_drawn_seed_that_config_yaml_keeps(tmp_path, tiny):
    config = tiny(drop_last=True)
    run = finished(tmp_path / "drawn", config, "seed=null", "epochs=1")
    assert len(run.column("loss")) == 10
    resumed = finished(tmp_path / "drawn", config, "seed=null", "epochs=2", "resume_from_checkpoint=True")
    again = finished(tmp_path / "again", config, f"seed={OmegaConf.load(run.folder / 'config.yaml').seed}", "epochs=2")
    assert again.column("loss") == resumed.column("loss")


def test_profiler_writes_a_trace(tmp_path, tiny):
    profiler = {"_component_": "torchtune.training.setup_torch_profiler", "enabled": True, "cpu": True, "cuda": False}
    profiler |= {"xpu": False, "output_dir": str(tmp_path / "trace"), "num_cycles": 1}
    profiler |= dict.fromkeys(("wait_steps", "warmup_steps", "active_steps"), 1)
    finished(tmp_path, tiny(profiler=profiler, max_steps_per_epoch=4))
    assert list((tmp_path / "trace").rglob("*.json*"))


@pytest.mark.parametrize("dtype", ["bf16_mixed", "bf16_stochastic"])
def test_mixed_and_stochastic_precision_on_two_ranks(dtype, tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its optimizer; a test machine may lack a compiler
    run = finished(tmp_path, tiny(dtype=dtype, batch_size=2), ranks=2)
    assert sum(run.column("loss")[-5:]) < sum(run.column("loss")[:5])
    stored = {tensor.dtype for tensor in weights(run.folder / "epoch_0").values()}
    assert stored == {torch.float32 if dtype == "bf16_mixed" else torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(run.folder / "epoch_0").dtype == stored.pop()
