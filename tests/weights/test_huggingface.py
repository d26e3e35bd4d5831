"""Folders in and out: transformers' weights, shards, dtypes."""

import json

import pytest
import torch
from helpers.runs import llama_args
from safetensors.torch import load_file
from torchtune.models.llama2 import llama2
from transformers import AutoModelForCausalLM

from finch.errors import UserError
from finch.weights import huggingface
from finch.weights.huggingface import HuggingFaceFolder


@pytest.mark.parametrize("max_bytes", [10**9, 6000])
def test_written_weights_equal_those_read(base_folder, tmp_path, monkeypatch, max_bytes):
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", max_bytes)
    base = HuggingFaceFolder(str(base_folder))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("of an attempt before")
    base.write(base.weights(), tmp_path / "out", is_writer=True)
    assert not (tmp_path / "out" / "stale").exists()
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(shards) > 3) == (max_bytes == 6000)
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    original = load_file(base_folder / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert not list(tmp_path.glob("*.partial"))
    again = HuggingFaceFolder(str(tmp_path / "out"))  # found through the index
    assert len(again.files) == len(shards)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.num_parameters() == sum(tensor.numel() for tensor in original.values())


def test_config_has_the_stored_dtype(base_folder, tmp_path):
    base = HuggingFaceFolder(str(base_folder))
    base.write(base.weights(), tmp_path / "out", is_writer=True, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_torchtunes_file_names_are_accepted(base_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        target = "part_1_of_1.safetensors" if name.startswith("model") else name
        (tmp_path / target).write_bytes((base_folder / name).read_bytes())
    files = {"filename_format": "part_{}_of_{}.safetensors", "max_filename": "1"}
    folder = HuggingFaceFolder(str(tmp_path), files, model_type="LLAMA2", output_dir="x", recipe_checkpoint=None)
    assert [file.name for file in folder.files] == ["part_1_of_1.safetensors"]
    with pytest.raises(UserError, match="filename_format and max_filename"):
        HuggingFaceFolder(str(tmp_path), {"format": "x"})


def test_pickled_weights_are_read_as_weights_only(base_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((base_folder / "config.json").read_bytes())
    torch.save(load_file(base_folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    folder = HuggingFaceFolder(str(tmp_path), ["pytorch_model.bin"])
    folder.check_shapes(llama2(**llama_args()))
    one, other = dict(folder.weights()), dict(HuggingFaceFolder(str(base_folder)).weights())
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_untied_head_is_refused_by_a_tied_model(base_folder):
    from torchtune.models.llama3_2 import llama3_2

    with pytest.raises(UserError, match=r"output\.weight has shape \[64, 32\], the model has no such weight"):
        HuggingFaceFolder(str(base_folder)).check_shapes(llama3_2(**llama_args(), tie_word_embeddings=True))


def test_broken_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        HuggingFaceFolder(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        HuggingFaceFolder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match="model of type 'mamba', which finch cannot convert; it knows llama"):
        HuggingFaceFolder(str(tmp_path))
