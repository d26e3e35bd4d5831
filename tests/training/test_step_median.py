"""TALR's tau over micro-batches: exact before the first backward, lagged from the step before."""

import math
import statistics

import pytest
import torch

from finch.distributed.parallel import Parallel
from finch.objectives import TALR, CrossEntropy
from finch.training.step_median import StepMedian


def batch_of(*losses):
    """A row for each loss, of one target token."""
    column = torch.tensor(losses).unsqueeze(1)
    return {"labels": torch.zeros_like(column, dtype=torch.int64), "losses": column}


def run(median, *batches):
    """A step as the recipe takes it; returns the statistic each micro-batch got and how many forwards ran ahead."""
    ahead = []

    def forward(batch):
        ahead.append(batch)
        return batch["losses"]

    median.before_step(batches, forward)
    for batch in batches:
        median.observe(batch["losses"], batch)
    median.after_step()
    return [float(batch["statistic"]) if "statistic" in batch else None for batch in batches], len(ahead)


def alone(objective):
    return StepMedian(objective, Parallel(torch.device("cpu")))


def test_exact_is_the_median_of_all_micro_batches_for_each_of_them():
    median = alone(TALR("exact"))
    assert run(median, batch_of(1.0, 5.0), batch_of(2.0, 9.0)) == ([3.5, 3.5], 2)
    assert run(median, batch_of(1.0, 5.0, 7.0)) == ([5.0], 0)  # one micro-batch: its own forward says it
    assert median.last is None


def test_lagged_is_the_step_befores():
    median = alone(TALR("lagged"))
    assert run(median, batch_of(1.0, 5.0), batch_of(2.0, 9.0)) == ([3.5, 3.5], 2)  # the first step's own
    assert run(median, batch_of(4.0), batch_of(6.0)) == ([3.5, 3.5], 0)
    assert run(median, batch_of(math.nan)) == ([5.0], 0)
    assert median.last == statistics.median([4.0, 6.0])  # the last finite one


@pytest.mark.parametrize("objective", [TALR(2.0), CrossEntropy()])
def test_nothing_is_done_where_nothing_is_declared(objective):
    assert run(alone(objective), batch_of(1.0)) == ([None], 0)
