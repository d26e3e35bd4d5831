"""Folders in and out: transformers' weights, shards, dtypes; on several ranks each reads its own shards, and none gathers a tensor."""

import json
import shutil

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.ranks import on_ranks
from helpers.runs import llama_args
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torchtune.models.llama2 import llama2
from transformers import AutoModelForCausalLM

from benchmarks.memory import count_read_bytes
from finch.base import dtensor
from finch.base.errors import UserError
from finch.config.instantiate import locate
from finch.distributed import fsdp, parallel
from finch.distributed.tensor_parallel import apply_plan
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

    with pytest.raises(
        UserError, match="stores a head that differs from the embedding, which the model takes for both"
    ):
        HuggingFaceFolder(str(base_folder)).check_shapes(llama3_2(**llama_args(), tie_word_embeddings=True))


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (1, 32, 32), (1024,), (16, 32), (32, 16), (0, 32)])
def test_a_weight_of_another_shape_is_refused_by_its_header(shape, base_folder, tmp_path):
    """Also one of as many elements, whose heads can be permuted."""
    shutil.copytree(base_folder, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.q_proj.weight": torch.zeros(shape)}, file)
    with pytest.raises(UserError, match=r"q_proj.weight|does not belong to the llama model"):
        HuggingFaceFolder(str(tmp_path / "base")).check_model(llama2(**llama_args()), "torchtune.models.llama2.llama2")


def test_broken_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        HuggingFaceFolder(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        HuggingFaceFolder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match="model of type 'mamba', which finch cannot convert; it knows llama"):
        HuggingFaceFolder(str(tmp_path))


# On several ranks

MESHES = {
    "shard": parallel.MeshSizes(),
    "hsdp": parallel.MeshSizes(replicate=2),
    "shard x tensor": parallel.MeshSizes(tensor=2),
}
CASES = [
    *(("llama", mesh) for mesh in MESHES),
    ("phi3 grouped", "shard"),
    ("qwen2", "hsdp"),
    ("qwen3 tied", "shard x tensor"),
    ("gemma2", "shard"),
]
PLANS = {"llama": "torchtune.models.llama3.base_llama_tp_plan", "qwen3 tied": "finch.models.qwen3.qwen3_tp_plan"}


def parameters_on(place, name):
    """An empty decoder of the family on a mesh."""
    with torch.device("meta"):
        decoder = FAMILIES[name].build()
    if place.tensor_mesh is not None:
        apply_plan(decoder, locate(PLANS[name], "plan")(), place.tensor_mesh)
    fsdp.shard_model(decoder, decoder.layers, place)
    decoder.to_empty(device="cpu")
    parameters = decoder.state_dict(keep_vars=True)
    kinds = {str(parameter.placements) for parameter in parameters.values()}
    assert len(kinds) >= 3 if place.tensor_mesh is not None else len(kinds) == 1, kinds
    return parameters


def local_bits(parameters):
    return {key: dtensor.to_local(each.detach()).clone().view(torch.uint8) for key, each in parameters.items()}


def read_and_write(folder, ranks, monkeypatch):
    """Loads on every mesh, by shards and by complete weights, and writes FOLDER/CASE. Returns the names that differ, and the
    bytes that this rank read for each case."""
    differ, num_bytes = [], {}
    for name, mesh in CASES:
        base, case = HuggingFaceFolder(str(folder / name)), f"{name}, {mesh}"
        parameters = parameters_on(parallel.join(torch.device("cpu"), MESHES[mesh].resolve(ranks.world_size)), name)
        with count_read_bytes() as parts:
            base.load_into([parameters])
        num_bytes[case] = sum(parts)
        loaded = local_bits(parameters)
        for key, tensor in base.weights():
            dtensor.load_full_tensor(parameters[key], tensor)
        expected = local_bits(parameters)
        differ += [f"{case}: {key}" for key in expected if not torch.equal(loaded[key], expected[key])]
        with monkeypatch.context() as patch:
            patch.delattr(DTensor, "full_tensor")
            base.write(parameters.items(), folder / case, is_writer=ranks.is_rank_zero)
    return differ, num_bytes


def test_load_and_write_on_every_mesh(tmp_path):
    size = {}
    for name in dict(CASES):
        save(name, tmp_path / name)
        size[name] = (tmp_path / name / "model.safetensors").stat().st_size
    code = """
        import pytest
        from finch.distributed import parallel
        from weights.test_huggingface import read_and_write
        ranks = parallel.start(device, shard=False)
        tell(read_and_write(folder, ranks, pytest.MonkeyPatch()))
        parallel.stop()
    """
    outcomes = on_ranks(4, code, tmp_path)
    assert [differ for differ, _ in outcomes] == [[]] * 4
    for name, mesh in CASES:
        case = f"{name}, {mesh}"
        most = max(num_bytes[case] for _, num_bytes in outcomes)
        print(f"{case}: at most {most / size[name]:.2f} of the model on a rank")
        assert most < (0.3 if mesh != "hsdp" else 0.55) * size[name]
        # transformers wrote the one, finch the other from shards.
        written = (tmp_path / case / "model.safetensors").read_bytes()
        assert written == (tmp_path / name / "model.safetensors").read_bytes(), case
