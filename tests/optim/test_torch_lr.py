"""TorchLR against torch's own order of optimizer and scheduler steps."""

import json

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    SequentialLR,
    StepLR,
)

from finch.optim.torch_lr import TorchLR, cosine_with_warmup

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=7),  # continues from the learning rate before
    "step": lambda optimizer: StepLR(optimizer, step_size=3),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), StepLR(optimizer, step_size=2)], milestones=[2]
    ),
    "constant": lambda optimizer: None,
}


def optimizers(number=1, lr=0.5):
    """``lr`` may be a tensor, as in torchao's optimizers; each gets its own."""
    return [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr * 1) for _ in range(number)]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_lr_equals_torchs_own_order(name, decay, lr):
    """There the scheduler steps after the optimizer; also with an optimizer for each parameter, and resumed from JSON."""
    options = {"decay": decay, "total_steps": 9}
    (reference,) = optimizers(lr=lr)
    scheduler, expected = SCHEDULERS[name](reference), []
    for step in range(9):
        factor = min(1.0, (9 - step) / (9 * decay)) if decay else 1.0
        expected.append(float(rate(reference)) * factor)
        reference.step()
        if scheduler is not None:
            scheduler.step()

    ours = optimizers(2, lr)
    schedule, rates = TorchLR(ours, SCHEDULERS[name](ours[0]), **options), []
    for step in range(9):
        if step == 5:
            state = json.loads(json.dumps(schedule.state_dict()))
            ours = optimizers(2, lr)
            schedule = TorchLR(ours, SCHEDULERS[name](ours[0]), **options)
            schedule.load_state_dict(state)
        assert schedule.step(1.0, 3)
        json.dumps(schedule.metrics())
        rates.append((float(rate(ours[0])), float(rate(ours[1])), schedule.metrics()["lr"]))
        assert all(type(rate(optimizer)) is type(lr) for optimizer in ours)
        assert rate(ours[0]) is not rate(ours[1]) or isinstance(lr, float)
        for optimizer in ours:
            optimizer.step()
    assert rates == [(pytest.approx(value, rel=1e-6 if decay else 0),) * 3 for value in expected]


@pytest.mark.parametrize(
    ("steps", "from_zero", "warning"),
    [(2, False, "step 2 had the rate 0.125 and has 0.25 by this"), (2, True, ""), (5, False, "")],
)
def test_state_of_an_earlier_warmup_continues_or_is_said(caplog, steps, from_zero, warning):
    """Whose first step had the rate 0: after its 4 steps nothing is different."""

    def make(from_zero):
        (optimizer,) = optimizers()
        options = {"warmup_fraction": 0.4, "warmup_from_zero": from_zero}
        return TorchLR([optimizer], cosine_with_warmup(optimizer, 10, **options)), optimizer

    earlier, optimizer = make(True)
    for _ in range(steps):
        earlier.step(1.0)
        optimizer.step()
    resumed, optimizer = make(from_zero)
    resumed.load_state_dict(earlier.state_dict())
    for schedule in (earlier, resumed):
        schedule.step(1.0)
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text) == (resumed.metrics()["lr"] != earlier.metrics()["lr"])


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
