import json

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from finch.timed import TimedLR

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=7),  # goes on from the rate before
    "step": lambda optimizer: StepLR(optimizer, step_size=3),
    "constant": lambda optimizer: None,
}


def optimizers(number=1):
    return [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(number)]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rates_are_those_of_torchs_own_order(name):
    """There the scheduler steps after the optimizer; also with an optimizer for each parameter, and broken in between."""
    (reference,) = optimizers()
    scheduler, expected = SCHEDULERS[name](reference), []
    for _ in range(9):
        expected.append(rate(reference))
        reference.step()
        if scheduler is not None:
            scheduler.step()

    ours = optimizers(2)
    timed, seen = TimedLR(ours, SCHEDULERS[name](ours[0])), []
    for step in range(9):
        if step == 5:
            state = json.loads(json.dumps(timed.state_dict()))
            ours = optimizers(2)
            timed = TimedLR(ours, SCHEDULERS[name](ours[0]))
            timed.load_state_dict(state)
        assert timed.step(1.0, 3)
        seen.append((rate(ours[0]), rate(ours[1]), timed.metrics()["lr"]))
        for optimizer in ours:
            optimizer.step()
    assert seen == [(value,) * 3 for value in expected]


def test_a_step_without_targets_or_with_a_loss_that_is_not_finite_uses_up_its_rate():
    (optimizer,) = optimizers()
    timed = TimedLR([optimizer], SCHEDULERS["lambda"](optimizer), on_nonfinite="skip", max_nonfinite=2)
    assert timed.step(1.0)
    assert not timed.step(0.0, 0)
    assert not timed.step(torch.tensor(float("nan")), 4)
    assert timed.check() == 1
    assert timed.check() == 0
    assert timed.step(1.0)
    assert rate(optimizer) == 0.5 / 4
    assert not timed.step(float("inf"))
    with pytest.raises(FloatingPointError, match="2 times in a row, last at step 6: lower"):
        timed.step(float("nan"))


def test_it_raises_unless_told_otherwise():
    with pytest.raises(FloatingPointError, match="not finite at step 1"):
        TimedLR(optimizers()).step(float("nan"))
    with pytest.raises(ValueError, match="on_nonfinite='ignore' must be"):
        TimedLR(optimizers(), on_nonfinite="ignore")
    with pytest.raises(ValueError, match="max_nonfinite=0 must be"):
        TimedLR(optimizers(), max_nonfinite=0)
