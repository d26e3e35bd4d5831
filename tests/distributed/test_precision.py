"""What each dtype does to many small updates, and what is refused."""

import contextlib

import pytest
import torch
from torch import nn

from finch.base import dtensor
from finch.base.errors import UserError
from finch.distributed import fsdp, parallel
from finch.distributed.precision import PRECISIONS, check_hardware, precision_of
from finch.optim.optimizer_variants import adapt, stochastic_optimizer


@pytest.fixture
def one_rank():
    """FSDP2 in one process: mixed precision is its policy's."""
    yield parallel.start(torch.device("cpu"), shard=True)
    parallel.stop()


def _eager(function, **kwargs):
    return function


def displacement(dtype, mesh_of=None):
    """Mean movement of weights of scale 0.02 after 500 updates of 1e-5, all in one direction."""
    precision = precision_of(dtype)
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False, dtype=precision.weights)
    nn.init.normal_(layer.weight, std=0.02)
    model = nn.Sequential(layer)
    if mesh_of is not None:
        fsdp.shard_model(model, [layer], mesh_of, mixed_precision=precision.policy())
    start = dtensor.full_tensor(model[0].weight.detach()).double().clone()
    arguments = {"lr": 1e-5, "weight_decay": 0.0}
    if precision.stochastic:
        import torchao.optim

        block = stochastic_optimizer({"_component_": "torch.optim.AdamW", **arguments})
        optimizer = getattr(torchao.optim, block.pop("_component_").rpartition(".")[2])(model.parameters(), **block)
        adapt(optimizer)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    inputs = torch.ones(1, 64, dtype=precision.compute)
    for _ in range(500):
        model(inputs).sum().backward()  # the gradient of every weight is 1: Adam moves each by lr, downwards
        optimizer.step()
        optimizer.zero_grad()
    return float((start - dtensor.full_tensor(model[0].weight.detach()).double()).mean())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16_mixed"])
def test_gpu_without_bf16_is_named(dtype, monkeypatch):
    """One that only emulates it, as all before Ampere do."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    refused = contextlib.nullcontext()
    if dtype != "fp32":
        refused = pytest.raises(UserError, match=f"^dtype={dtype} needs bf16, which Tesla V100 lacks: use fp32$")
    with refused:
        check_hardware(dtype, torch.device("cuda"))


def test_small_updates_survive_unless_pure_bf16(one_rank, monkeypatch):
    monkeypatch.setattr(torch, "compile", _eager)  # torchao compiles its update; here it need not be fast
    reference = displacement("fp32")
    assert reference == pytest.approx(500 * 1e-5, rel=1e-3)
    assert displacement("bf16_mixed", one_rank) == pytest.approx(reference, rel=0.02)
    assert displacement("bf16_stochastic", one_rank) == pytest.approx(reference, rel=0.02)
    assert abs(displacement("bf16") - reference) > 0.3 * reference


def test_mixed_computes_in_bf16_and_reduces_in_fp32(one_rank):
    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: seen.append((module.weight.dtype, output.dtype)))
    model = nn.Sequential(layer)
    fsdp.shard_model(model, [layer], one_rank, mixed_precision=PRECISIONS["bf16_mixed"].policy())
    model(torch.ones(1, 4)).sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {(each.dtype, each.grad.dtype) for each in model.parameters()} == {(torch.float32, torch.float32)}


def test_stochastic_optimizer_states_are_sharded(one_rank, monkeypatch):
    import torchao.optim

    monkeypatch.setattr(torch, "compile", _eager)
    model = nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    fsdp.shard_model(model, [], one_rank)
    optimizer = torchao.optim._AdamW(model.parameters(), lr=1e-2, bf16_stochastic_round=True)
    adapt(optimizer)
    for _ in range(2):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    ((parameter, state),) = optimizer.state.items()
    assert parameter is model[0].weight
    assert state["step"] == 2
    for moment in (state["exp_avg"], state["exp_avg_sq"]):
        assert (moment.placements, moment.dtype) == (parameter.placements, torch.float32)
        assert moment.full_tensor().abs().sum() > 0


def test_optimizer_that_cannot_round_stochastically_is_refused():
    with pytest.raises(UserError, match=r"torch\.optim\.SGD cannot round stochastically"):
        stochastic_optimizer({"_component_": "torch.optim.SGD"})


def test_stochastic_optimizer_drops_kernel_arguments():
    for given, variant in (("torch.optim.AdamW", "_AdamW"), ("torchao.optim.AdamW8bit", "AdamW8bit")):
        block = {"_component_": given, "lr": 1.0, **({"fused": True} if variant == "_AdamW" else {})}
        expected = {"_component_": f"torchao.optim.{variant}", "lr": 1.0, "bf16_stochastic_round": True}
        assert stochastic_optimizer(block) == expected
