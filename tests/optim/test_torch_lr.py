"""TorchLR against torch's own order of optimizer and scheduler steps."""

import json

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from finch.optim.torch_lr import TorchLR

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=7),  # continues from the learning rate before
    "step": lambda optimizer: StepLR(optimizer, step_size=3),
    "constant": lambda optimizer: None,
}


def optimizers(number=1, lr=0.5):
    """``lr`` may be a tensor, as in torchao's optimizers; each gets its own."""
    return [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr * 1) for _ in range(number)]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_lr_equals_torchs_own_order(name, lr):
    """There the scheduler steps after the optimizer; also with an optimizer for each parameter, and resumed from JSON."""
    (reference,) = optimizers(lr=lr)
    scheduler, expected = SCHEDULERS[name](reference), []
    for _ in range(9):
        expected.append(float(rate(reference)))
        reference.step()
        if scheduler is not None:
            scheduler.step()

    ours = optimizers(2, lr)
    schedule, rates = TorchLR(ours, SCHEDULERS[name](ours[0])), []
    for step in range(9):
        if step == 5:
            state = json.loads(json.dumps(schedule.state_dict()))
            ours = optimizers(2, lr)
            schedule = TorchLR(ours, SCHEDULERS[name](ours[0]))
            schedule.load_state_dict(state)
        assert schedule.step(1.0, 3)
        json.dumps(schedule.metrics())
        rates.append((float(rate(ours[0])), float(rate(ours[1])), schedule.metrics()["lr"]))
        assert all(type(rate(optimizer)) is type(lr) for optimizer in ours)
        assert rate(ours[0]) is not rate(ours[1]) or isinstance(lr, float)
        for optimizer in ours:
            optimizer.step()
    assert rates == [(value,) * 3 for value in expected]


def test_torch_lr_counts_steps_that_are_not_taken():
    (optimizer,) = optimizers()
    schedule = TorchLR([optimizer], SCHEDULERS["lambda"](optimizer), on_nonfinite="skip", max_nonfinite=2)
    assert schedule.step(1.0)
    assert not schedule.step(0.0, 0)
    assert not schedule.step(torch.tensor(float("nan")), 4)
    assert schedule.check() == 1
    assert schedule.check() == 0
    assert schedule.step(1.0)
    assert rate(optimizer) == 0.5 / 4
    assert not schedule.step(float("inf"))
    with pytest.raises(FloatingPointError, match="2 times in a row, last at step 6: lower"):
        schedule.step(float("nan"))


def test_torch_lr_raises_by_default():
    with pytest.raises(FloatingPointError, match="not finite at step 1"):
        TorchLR(optimizers()).step(float("nan"))
