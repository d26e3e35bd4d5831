"""The host's time per operator."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finch.optim.finch_lr import FinchLR, NonfiniteError
from finch.plan.gpu_check.host import take_every_step


def test_fake_ranks_take_a_step_whose_gathered_weights_are_nan() -> None:
    schedule = FinchLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), eta_base=1e-3, eta_max=1.0)
    loss, targets = torch.tensor(math.nan), torch.tensor(1.0)
    with pytest.raises(NonfiniteError):
        schedule.step(loss, targets)
    step: Any = SimpleNamespace(step=SimpleNamespace(update=SimpleNamespace(schedule=schedule)))
    take_every_step(step)
    assert schedule.step(loss, targets)
