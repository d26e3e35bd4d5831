"""Folders read and written on several ranks: each reads its own shards, none gathers a complete tensor."""

from __future__ import annotations

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.ranks import on_ranks
from torch.distributed.tensor import DTensor

from benchmarks.memory.usage import count_read_bytes
from finch import dtensor
from finch.distributed import fsdp, parallel
from finch.distributed.tensor_parallel import apply_plan, build_plan
from finch.weights.huggingface import HuggingFaceFolder

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
        apply_plan(decoder, build_plan({"_component_": PLANS[name]}, decoder, 2), place.tensor_mesh)
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


@pytest.mark.slow
def test_load_and_write_on_every_mesh(tmp_path):
    size = {}
    for name in dict(CASES):
        save(name, tmp_path / name)
        size[name] = (tmp_path / name / "model.safetensors").stat().st_size
    code = """
        import pytest
        from finch.distributed import parallel
        from weights.test_base import read_and_write
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
