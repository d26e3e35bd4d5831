"""The norm of gradients, and clipping by it in the optimizer's kernel."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.runs import environment
from torch import nn

from finch import FinchLR
from finch.distributed.parallel import Parallel
from finch.optim.torch_lr import TorchLR
from finch.training.clipping import grad_norm
from finch.training.optimizer import Update, check_rounding


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(size, dtype=torch.float64).to(dtype)) for name, size in (("a", 300), ("b", 7))
    }


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_is_wide(dtype: torch.dtype) -> None:
    parameters = weights(dtype)
    set_gradients(parameters, 0)
    found = grad_norm(list(parameters.values()))
    exact = torch.cat([parameter.grad.double() for parameter in parameters.values()]).norm()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(found) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("is_finch", [True, False])
def test_clipping_in_the_kernel_is_that_in_memory(is_finch: bool) -> None:
    """With a norm above and one below the limit, which leaves gradients as they are."""
    trained = []
    for in_kernel in (True, False):
        parameters = weights(torch.float32)
        rate = torch.tensor(1e-2) if is_finch else 1e-2
        sgd = torch.optim.SGD([{"params": list(parameters.values()), "lr": rate}], momentum=0.9, fused=True)
        schedule = FinchLR(sgd, init="first_batch", eta_max=1.0) if is_finch else TorchLR([sgd], None)
        model = SimpleNamespace(trained_parameters=parameters.copy)
        update = Update(model, [sgd], schedule, Parallel(torch.device("cpu")), clip_grad_norm=5.0)
        assert not update.clips_in_kernel  # on a CPU
        update.clips_in_kernel = in_kernel
        for step, factor in enumerate((1.0, 1e-2)):
            set_gradients(parameters, step)
            for parameter in parameters.values():
                parameter.grad *= factor
            norm = update.clip()
            assert (norm > 5) == (factor == 1)
            update.step(torch.tensor(2.0), norm, torch.tensor(1))
        trained.append(torch.cat([parameter.detach() for parameter in parameters.values()]))
    torch.testing.assert_close(*trained, rtol=1e-6, atol=0)
    assert not torch.equal(trained[0], torch.cat([each.detach() for each in weights(torch.float32).values()]))


@pytest.mark.parametrize(("rate", "is_said"), [(2e-5, True), (3e-3, True), (2e-2, False)])
def test_share_that_bf16_rounds_away_is_that_of_an_adam_step(rate: float, is_said: bool, caplog) -> None:
    """Adam's first update is the learning rate, here away from 0."""
    parameters = list(weights(torch.bfloat16).values())
    before = [each.detach().clone() for each in parameters]
    check_rounding(parameters, rate, Parallel(torch.device("cpu")))
    for each in parameters:
        each.grad = -each.detach().sign()
    torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True).step()
    equal = torch.cat([one == other for one, other in zip(before, parameters, strict=True)]).double().mean()
    assert (equal > 0.1) == is_said
    said = [re.findall(r"in bf16 (\d+%) of the weights", line.message) for line in caplog.records]
    assert said == [[f"{equal:.0%}"]] * is_said


def test_steps_on_local_shards_are_those_on_dtensors_bit_for_bit(tmp_path) -> None:
    """Rows that two ranks cannot share evenly, sharded by FSDP2 and by HSDP; the third step continues from a state that was saved."""
    code = """
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from finch.base.dtensor import full_tensor
        from finch.optim.optimizer_variants import on_local_shards
        from finch.training.clipping import grad_norm

        dist.init_process_group("gloo")

        def trained(mesh, kind, is_local):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(3 + i, 4 + i) for i in range(4)])
            fully_shard(model, mesh=mesh)
            parameters, found = list(model.parameters()), []
            optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, fused=True)
            if is_local:
                on_local_shards(optimizer)
            for step in range(3):
                for number, each in enumerate(parameters):
                    each.grad = each.detach() * (number + step + 1)
                norms = torch.stack(torch._foreach_norm([each.grad for each in parameters], 2))
                found.append(grad_norm(parameters) if is_local else torch.linalg.vector_norm(norms).full_tensor())
                optimizer.step()
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
            states = [each["exp_avg"] for each in optimizer.state.values()]
            assert all(isinstance(each, DTensor) for each in states)
            return found + [full_tensor(each.detach()) for each in [*parameters, *states]]

        shapes = {(2,): ("shard",), (2, 1): ("copy", "shard"), (1, 2): ("copy", "shard")}
        meshes = [init_device_mesh("cpu", shape, mesh_dim_names=names) for shape, names in shapes.items()]
        pairs = [
            (kind, one, other)
            for mesh in meshes
            for kind in ("AdamW", "Adam")
            for one, other in zip(*(trained(mesh, kind, is_local) for is_local in (True, False)), strict=True)
        ]
        tell([len(pairs), sum(torch.equal(one, other) for _, one, other in pairs)])
    """
    assert on_ranks(2, code, tmp_path) == [[3 * 2 * 19] * 2] * 2


COMPLETE = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finch.optim.optimizer_variants import on_local_shards
from finch.training.clipping import grad_norm

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
calls = []
real = fake_tensor.run_fallback_kernel
fake_tensor.run_fallback_kernel = lambda mode, func, *rest: calls.append(str(func)) or real(mode, func, *rest)
model = nn.Linear(16, 16, bias=False)
fully_shard(model)
for is_local in (True, False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    if is_local:
        on_local_shards(optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    grad_norm([model.weight])
    optimizer.step()
    print(len(calls))
"""


def test_no_step_makes_tensors_of_the_complete_models_size() -> None:
    """With a tensor as learning rate, the dispatch of DTensors runs the kernel on zeros of the complete weights; that of shards does not."""
    command = [sys.executable, "-W", "ignore", "-c", COMPLETE]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert found.stdout.split() == ["0", "1"], found.stderr
