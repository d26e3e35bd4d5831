"""The norm of gradients, and clipping by it in the optimizer's kernel."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from finch import FinchLR
from finch.distributed.parallel import Parallel
from finch.distributed.precision import precision_of
from finch.optim.torch_lr import TorchLR
from finch.training import optimizer
from finch.training.optimizer import Update, grad_norm


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


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("Adam", True), ("SGD", None)])
def test_a_fused_kernel_that_takes_no_shards_is_not_used_for_them(name, fused, monkeypatch) -> None:
    cfg = OmegaConf.create({"optimizer": {"_component_": f"torch.optim.{name}", "lr": 0.1, "fused": True}})
    cfg.update(fsdp_cpu_offload=False, optimizer_in_bwd=False)
    arguments = list(weights(torch.float32).values()), precision_of("fp32"), torch.device("cpu")
    for sharded_class, expected in ((nn.Parameter, fused), (SimpleNamespace, True)):
        monkeypatch.setattr(optimizer, "DTensor", sharded_class)
        [made] = optimizer.build_optimizers(cfg, *arguments, tensor_lr=False)
        assert made.param_groups[0]["fused"] == expected
