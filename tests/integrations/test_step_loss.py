"""MeanLoss in one process; test_equality has its ranks."""

from __future__ import annotations

import math

import pytest
import torch

from finch.integrations.step_loss import MeanLoss


def test_mean_is_over_tokens_and_starts_again():
    step_loss = MeanLoss()
    step_loss.update(torch.tensor(6.0), torch.tensor(2))
    step_loss.update(torch.tensor(math.nan), torch.tensor(0))  # the mean of a micro-batch without targets
    step_loss.update(4.0, 3)
    assert [float(value) for value in step_loss.compute()] == [2.0, 5.0]
    step_loss.update(1.0, 1)
    assert [float(value) for value in step_loss.compute()] == [1.0, 1.0]


def test_step_without_targets_has_no_mean():
    step_loss = MeanLoss()
    step_loss.update(torch.tensor(0.0), 0)
    loss, num_targets = step_loss.compute()
    assert loss.isnan()
    assert num_targets == 0


def test_step_without_micro_batch_is_refused():
    with pytest.raises(RuntimeError, match="has had no micro-batch"):
        MeanLoss().compute()
