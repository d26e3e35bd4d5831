"""What a run of the LoRA recipe leaves behind: adapters for PEFT, a merged folder, a checkpoint of the adapters."""

from pathlib import Path

import pytest
import torch
from helpers.runs import LORA, LORA_MODEL, finished, make_config, validated, weights
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM


def adapter(run, epoch=0):
    return load_file(run.folder / f"epoch_{epoch}_adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(trained, base_folder, rows_file):
    config = validated(make_config(base_folder, rows_file, Path("run"), model=LORA_MODEL, batch_size=8, epochs=2))
    return trained(config, recipe=LORA), config


def test_lora_trains_adapters_only(alone, base_folder):
    run, _ = alone
    assert sum(run.column("loss")[-3:]) < sum(run.column("loss")[:3])
    assert len(set(run.column("lr"))) > 10
    began, ended = weights(base_folder), weights(run.folder / "epoch_1")
    moved = {name for name in began if not torch.equal(began[name], ended[name])}
    assert moved == {name for name in began if "_proj" in name}
    assert set(adapter(run, 0)) == set(adapter(run, 1))
    assert (run.folder / "best").readlink().name in ("epoch_0", "epoch_1")


def test_lora_checkpoint_holds_adapters_only(alone):
    run, _ = alone
    [checkpoint] = (run.folder / "checkpoints").iterdir()
    kept = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert sum(name.startswith("model.") for name in kept) == len(adapter(run, 1))
    assert all(".lora_" in name for name in kept)


def test_lora_merged_folder_is_base_plus_adapter(alone, base_folder):
    """W + alpha / rank * B A, layer by layer, from the files only."""
    run, _ = alone
    base, tuned, found = weights(base_folder), weights(run.folder / "epoch_1"), adapter(run, 1)
    for name, weight in tuned.items():
        if "_proj" in name:
            a, b = (found[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
            expected = base[name].double() + 8 / 4 * b.double() @ a.double()
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(run.folder / "epoch_1").config.model_type == "llama"


@pytest.mark.parametrize("objective", ["STM", "FLOW"])
def test_lora_with_an_objective(objective, alone, tmp_path):
    changes = [f"loss._component_=finch.objectives.{objective}"] + ["loss.threshold=60.0"] * (objective == "STM")
    changes += ["epochs=3", "optimizer.lr=2e-2", "lr_scheduler.eta_max=5e-2", "save_adapter_weights_only=True"]
    run = finished(tmp_path, alone[1], *changes, recipe=LORA)
    validated = [line["validation_loss"] for line in run.metrics(validation=True)]
    assert validated[3] < validated[1] < validated[0]
    assert not (run.folder / "epoch_0").exists()
    assert (run.folder / "best").readlink().name == "epoch_2_adapter"
