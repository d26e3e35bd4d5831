"""Sums, shards and devices, on one process and on two."""

import os
from unittest import mock

import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn

from finch.base.errors import UserError
from finch.distributed import fsdp, parallel


def test_parallel_needs_no_group_in_one_process():
    alone = parallel.start(torch.device("cpu"), shard=False)
    assert alone.mesh is None
    assert alone.is_rank_zero
    assert not torch.distributed.is_initialized()
    values = torch.tensor([1.0, 2.0])
    assert alone.all_reduce_sum_(values) is values
    assert alone.gather("x") == ["x"]
    alone.check_equal("x", values)
    alone.require_equal("x", 1)
    model = nn.Linear(2, 2)
    fsdp.shard_model(model, [], alone)
    assert type(model) is nn.Linear


def test_parallel_on_two_ranks(tmp_path):
    code = """
        from torch import nn
        from finch.base import dtensor
        from finch.distributed import fsdp, parallel
        ranks = parallel.start(device, shard=False)
        total = ranks.all_reduce_sum_(torch.tensor([0.1, 1.0 + ranks.rank], dtype=torch.float64))
        torch.manual_seed(0)
        whole = torch.randn(5, 3)  # does not divide by two
        model = nn.Linear(3, 5, bias=False)
        fsdp.shard_model(model, [], ranks)
        dtensor.load_full_tensor(model.weight, whole)
        try:
            ranks.check_equal("the rate", torch.tensor([float(ranks.rank)]))
            differs = ""
        except RuntimeError as error:
            differs = str(error)
        ranks.check_equal("the sum", total)
        tell({
            "sum": total.tolist(),
            "gathered": ranks.gather(ranks.rank * 10),
            "local": list(model.weight.to_local().shape),
            "whole": bool(torch.equal(dtensor.full_tensor(model.weight), whole)),
            "differs": differs,
        })
        parallel.stop()
    """
    found = on_ranks(2, code, tmp_path)
    assert found[0]["sum"] == found[1]["sum"] == [0.2, 3.0]
    assert [rank["local"] for rank in found] == [[3, 3], [2, 3]]
    for rank in found:
        assert rank["gathered"] == [0, 10]
        assert rank["whole"]
        assert "the rate differs between ranks: [[0.0], [1.0]]" in rank["differs"]


TIMEOUTS = """
    from finch.distributed import parallel
    ranks = parallel.start(device, shard=False, timeout_s=77, sizes=parallel.MeshSizes(1, 2, 2))
    both = ranks.tensor_mesh._get_root_mesh()["dp_shard_tp"]  # what an L2 penalty sums over
    groups = [ranks.mesh.get_group(), ranks.tensor_mesh.get_group(), ranks.data_group, both.get_group()]
    tell([each._get_backend(device).options._timeout.total_seconds() for each in groups])
    parallel.stop()
"""


def test_all_groups_of_a_mesh_have_the_runs_timeout(tmp_path):
    assert on_ranks(4, TIMEOUTS, tmp_path) == [[77] * 4] * 4


SHARDS = """
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from finch.base import dtensor
    from finch.distributed import fsdp, parallel
    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                peer = args[2] if "send" in function.__name__ or "recv" in function.__name__ else None
                moves.append([function.__name__.split(".")[0], peer, args[0][0].numel()])
            return function(*args, **(kwargs or {}))
    moves, ranks = [], parallel.start(device, shard=False, sizes=parallel.MeshSizes(SIZES))
    torch.manual_seed(0)
    whole = torch.randn(7, 3)
    model = nn.Linear(3, 7, bias=False)
    fsdp.shard_model(model, [], ranks)
    dtensor.load_full_tensor(model.weight, whole)
    found = torch.full_like(whole, float("nan"))
    with Moves():
        for block, shard in dtensor.each_shard(model.weight.detach()):
            found[block] = shard
    tell({"moves": moves, "whole": torch.equal(found, whole), "none": bool(found.isnan().all())})
    parallel.stop()
"""


@pytest.mark.parametrize(("copies", "shards"), [(1, {1: 6, 2: 6, 3: 3}), (2, {1: 9})])
def test_each_shard_goes_to_the_writing_rank_alone(copies, shards, tmp_path):
    """Four ranks, of which a copy of the model has two or four; seven rows of three."""
    writer, *others = on_ranks(4, SHARDS.replace("SIZES", str(copies)), tmp_path)
    assert writer["whole"]
    assert writer["moves"] == [["recv_", rank, size] for rank, size in shards.items()]
    for rank, other in enumerate(others, start=1):
        assert other["none"]
        assert other["moves"] == ([["send", 0, shards[rank]]] if rank in shards else [])


@pytest.mark.parametrize(
    ("nccl", "gloo", "expected"),
    [
        ("=lo", None, "lo"),
        ("lo", "eth7", "eth7"),
        ("l", None, "lo"),
        ("none_such,lo", None, "lo"),
        ("=l", None, None),
        ("^docker,lo", None, None),
        ("none_such", None, None),
        (None, None, None),
    ],
)
def test_gloo_takes_the_interface_of_nccl(monkeypatch, nccl, gloo, expected):
    for name, value in (("NCCL", nccl), ("GLOO", gloo)):
        monkeypatch.delenv(f"{name}_SOCKET_IFNAME", raising=False)
        if value is not None:
            monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value)
    with mock.patch.dict(os.environ):
        parallel.follow_nccl()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_segments_grow_unless_the_environment_says_otherwise(monkeypatch):
    settings = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "max_split_size_mb:128")
            parallel.use_expandable_segments()
    assert settings == []
    parallel.use_expandable_segments()
    assert settings == ["expandable_segments:True"]
    monkeypatch.undo()
    parallel.use_expandable_segments()  # what torch takes without a word


def test_local_device():
    assert parallel.local_device("cpu") == torch.device("cpu")
    assert parallel.local_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match="device=quantum is not known"):
        parallel.local_device("quantum")
