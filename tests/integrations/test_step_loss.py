"""MeanLoss in one process; test_equality has its ranks."""

import math

import pytest
import torch

from finch.integrations.step_loss import MeanLoss


def test_mean_is_over_tokens_and_starts_again():
    step_loss = MeanLoss()
    with pytest.raises(RuntimeError, match="has had no micro-batch"):
        step_loss.compute()
    step_loss.update(torch.tensor(6.0), torch.tensor(2))
    step_loss.update(torch.tensor(math.nan), torch.tensor(0))  # the mean of a micro-batch without targets
    step_loss.update(4.0, 3)
    assert [float(value) for value in step_loss.compute()] == [2.0, 5.0]
    step_loss.update(0.0, 0)
    loss, num_targets = step_loss.compute()
    assert loss.isnan()
    assert num_targets == 0
