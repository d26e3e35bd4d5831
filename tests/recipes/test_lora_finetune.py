"""The LoRA recipe through the real `tune run`: adapters for PEFT, a merged folder, resume, equality of layouts, mistakes."""

import pytest
import torch
from helpers.runs import llama_args, make_config, relative_l2, run_here, tune_run, weights
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

RECIPE = "finch_lora_finetune"
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}


def lora_config(base_folder, rows_file, run, **changes):
    model = {"_component_": "torchtune.models.llama2.lora_llama2", **llama_args(), **LORA}
    return make_config(base_folder, rows_file, run, model=model, **changes)


def adapter(run, epoch=0):
    return load_file(run.folder / f"epoch_{epoch}_adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, base_folder, rows_file):
    folder = tmp_path_factory.mktemp("lora")
    config = lora_config(base_folder, rows_file, folder / "run", batch_size=8, epochs=2)
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    run = run_here(folder, config, recipe=RECIPE)
    assert run.returncode == 0, run.output
    return run, config


def test_lora_trains_adapters_alone(alone, base_folder):
    run, _ = alone
    assert sum(run.column("loss")[-3:]) < sum(run.column("loss")[:3])
    assert len(set(run.column("lr"))) > 10
    began, ended = weights(base_folder), weights(run.folder / "epoch_1")
    moved = {name for name in began if not torch.equal(began[name], ended[name])}
    assert moved == {name for name in began if "_proj" in name}
    assert set(adapter(run, 0)) == set(adapter(run, 1))
    assert (run.folder / "best").readlink().name in ("epoch_0", "epoch_1")


def test_lora_merged_folder_is_base_plus_adapter(alone, base_folder):
    """W + alpha / rank * B A, layer by layer, from the files alone."""
    run, _ = alone
    base, tuned, found = weights(base_folder), weights(run.folder / "epoch_1"), adapter(run, 1)
    for name, weight in tuned.items():
        if "_proj" in name:
            a, b = (found[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
            expected = base[name].double() + 8 / 4 * b.double() @ a.double()
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(run.folder / "epoch_1").config.model_type == "llama"


def test_lora_resumes_bitwise_from_adapters(alone, tmp_path):
    straight, config = alone
    config = {**config, "output_dir": str(tmp_path / "run")}
    assert run_here(tmp_path, {**config, "epochs": 1}, recipe=RECIPE).returncode == 0
    run = run_here(tmp_path, config, "resume_from_checkpoint=True", recipe=RECIPE)
    assert run.returncode == 0, run.output
    for column in ("loss", "ema_loss", "lr", "grad_norm"):
        assert run.column(column) == straight.column(column)
    assert all(torch.equal(tensor, adapter(straight, 1)[name]) for name, tensor in adapter(run, 1).items())
    [checkpoint] = (run.folder / "checkpoints").iterdir()
    kept = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert sum(name.startswith("model.") for name in kept) == len(adapter(run, 1))
    assert all(".lora_" in name for name in kept)


def test_lora_two_ranks_equal_one(alone, tmp_path):
    straight, config = alone
    config = {**config, "output_dir": str(tmp_path / "run"), "batch_size": 4, "debug_checks": True}
    run = tune_run(tmp_path, config, ranks=2, recipe=RECIPE)
    assert run.returncode == 0, run.output[-3000:]
    for column in ("loss", "ema_loss", "lr", "grad_norm"):
        assert run.column(column) == pytest.approx(straight.column(column), rel=1e-5)
    assert relative_l2(weights(run.folder / "epoch_1"), weights(straight.folder / "epoch_1")) < 1e-5


@pytest.mark.parametrize("objective", ["STM", "FLOW"])
def test_lora_with_an_objective(objective, alone, tmp_path):
    config = {**alone[1], "output_dir": str(tmp_path / "run"), "epochs": 3}
    changes = [f"loss._component_=finch.objectives.{objective}"] + ["loss.threshold=60.0"] * (objective == "STM")
    changes += ["optimizer.lr=2e-2", "lr_scheduler.eta_max=5e-2", "save_adapter_weights_only=True"]
    run = run_here(tmp_path, config, *changes, recipe=RECIPE)
    assert run.returncode == 0, run.output
    validated = [line["validation_loss"] for line in run.metrics(validation=True)]
    assert validated[2] < validated[0] < run.column("loss")[0]
    assert not (run.folder / "epoch_0").exists()
    assert (run.folder / "best").readlink().name == "epoch_2_adapter"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"_component_": "torchtune.models.llama2.llama2", **llama_args()}},
            "builds no LoRA layers; give the builder",
        ),
        ({"model.lora_attn_modules": "[q_proj,o_proj]"}, "model.lora_attn_modules names o_proj; torchtune's names are"),
        ({"model.quantize_base": "True"}, "model.quantize_base=True (QLoRA) is not taken"),
        ({"regularizer._component_": "finch.regularization.L2"}, "regularizer=finch.regularization.L2 pulls weights"),
        (
            {"tensor_parallel_dim": "2", "tensor_parallel_plan": "torchtune.models.llama3.base_llama_tp_plan"},
            "does not cut LoRA layers",
        ),
    ],
)
def test_lora_mistakes_raise_one_line(changes, message, base_folder, rows_file, tmp_path):
    config = lora_config(base_folder, rows_file, tmp_path / "run")
    overrides = [f"{key}={value}" for key, value in changes.items() if key != "model"]
    run = run_here(
        tmp_path, {**config, **({"model": changes["model"]} if "model" in changes else {})}, *overrides, recipe=RECIPE
    )
    assert run.returncode == 1
    assert message in run.error()
    assert not run.folder.exists()
