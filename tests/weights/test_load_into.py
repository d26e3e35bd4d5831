"""Each rank reads its own shards: the same bits as from the complete weights, and nothing else of the files."""

from __future__ import annotations

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.ranks import on_ranks

from finch import dtensor
from finch.distributed import fsdp, parallel
from finch.distributed.tensor_parallel import apply_plan, build_plan
from finch.weights.files import StoredTensor
from finch.weights.huggingface import HuggingFaceFolder

MESHES = {
    "shard": parallel.MeshSizes(),
    "hsdp": parallel.MeshSizes(replicate=2),
    "shard x tensor": parallel.MeshSizes(tensor=2),
}

NAMES = ("llama", "phi3 grouped", "qwen2", "qwen3 tied", "gemma2")
PLANS = {"llama": "torchtune.models.llama3.base_llama_tp_plan", "qwen3 tied": "finch.models.qwen3.qwen3_tp_plan"}


def bits(tensor):
    return dtensor.to_local(tensor.detach()).contiguous().view(torch.uint8)


def load_on_every_mesh(folder, ranks):
    """Loads twice, by shards and by complete weights. Returns the names that differ, and the bytes read a rank for each mesh."""
    differ, num_bytes = [], {}
    read = StoredTensor.read

    def counted(stored, block):
        part = read(stored, block)
        num_bytes[case] += part.nbytes
        return part

    StoredTensor.read = counted
    for name in NAMES:
        base = HuggingFaceFolder(str(folder / name))
        for mesh, sizes in MESHES.items():
            if sizes.tensor > 1 and name not in PLANS:
                continue
            case = f"{name}, {mesh}"
            num_bytes[case] = 0
            place = parallel.join(torch.device("cpu"), sizes.resolve(ranks.world_size))
            with torch.device("meta"):
                decoder = FAMILIES[name].build()
            if place.tensor_mesh is not None:
                apply_plan(decoder, build_plan({"_component_": PLANS[name]}, decoder, 2), place.tensor_mesh)
            fsdp.shard_model(decoder, decoder.layers, place)
            decoder.to_empty(device="cpu")
            parameters = decoder.state_dict(keep_vars=True)
            kinds = {str(parameter.placements) for parameter in parameters.values()}
            assert len(kinds) == (3 if sizes.tensor > 1 else 1), kinds
            base.load_into([parameters])
            loaded = {key: bits(parameter).clone() for key, parameter in parameters.items()}
            read_bytes = num_bytes[case]
            for key, tensor in base.weights():
                dtensor.load_full_tensor(parameters[key], tensor)
            num_bytes[case] = read_bytes
            differ += [f"{case}: {key}" for key in loaded if not torch.equal(loaded[key], bits(parameters[key]))]
    return differ, num_bytes


@pytest.mark.slow
def test_load_into_equals_complete_weights_on_meshes(tmp_path):
    size = {}
    for name in NAMES:
        model = save(name, tmp_path / name)
        size[name] = sum(4 * parameter.numel() for parameter in model.parameters())
    code = """
        from finch.distributed import parallel
        from weights.test_load_into import load_on_every_mesh
        ranks = parallel.start(device, shard=False)
        tell(load_on_every_mesh(folder, ranks))
        parallel.stop()
    """
    outcomes = on_ranks(4, code, tmp_path)
    assert [differ for differ, _ in outcomes] == [[]] * 4
    for case in outcomes[0][1]:
        name, mesh = case.split(", ")
        most = max(num_bytes[case] for _, num_bytes in outcomes)
        print(f"{case}: at most {most / size[name]:.2f} of the model on a rank")
        assert most <= (0.3 if mesh != "hsdp" else 0.55) * size[name]
