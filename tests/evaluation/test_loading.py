"""Models as transformers loads them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from finch.errors import UserError
from finch.evaluation.loading import load_model, resolve_dtype
from finch.evaluation.model_folders import ModelFolder

CPU = torch.device("cpu")


@pytest.fixture
def folder(base_folder, tmp_path):
    return ModelFolder("--tuned", shutil.copytree(base_folder, tmp_path / "tuned"))


def change(folder, function):
    weights = load_file(folder.path / "model.safetensors")
    function(weights)
    save_file(weights, folder.path / "model.safetensors", {"format": "pt"})


def test_model_has_the_dtype_that_is_given(folder):
    assert {parameter.dtype for parameter in load_model(folder, "bf16", CPU).parameters()} == {torch.bfloat16}


def test_missing_weights_are_refused(folder):
    # transformers would put random values in their place.
    change(folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"lacks weights of its model, such as model\.norm\.weight"):
        load_model(folder, "fp32", CPU)


def test_broken_file_is_refused(folder):
    (folder.path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"--tuned=.* cannot be loaded by transformers"):
        load_model(folder, "fp32", CPU)


def test_automatic_dtype_is_the_bases_on_a_gpu(base_folder):
    assert resolve_dtype("auto", base_folder, torch.device("cuda")) == "fp32"
    assert resolve_dtype("auto", base_folder, CPU) == "fp32"
    assert resolve_dtype("bf16", base_folder, CPU) == "bf16"
