"""TALR's tau over micro-batches: of this step before the first backward, or lagged by a step."""

import math
import statistics

import pytest
import torch

from finch.distributed.parallel import Parallel
from finch.objectives import TALR, CrossEntropy
from finch.training.step_loss import StepMedian


def batch_of(*losses):
    """A row for each loss, of one target token."""
    column = torch.tensor(losses).unsqueeze(1)
    return {"labels": torch.zeros_like(column, dtype=torch.int64), "losses": column}


def run(median, *batches):
    """A step of the recipe; returns each micro-batch's statistic and the number of extra forwards."""
    extra = []

    def forward(batch):
        extra.append(batch)
        return batch["losses"]

    median.before_step(batches, forward)
    for batch in batches:
        median.observe(batch["losses"], batch)
    median.after_step()
    return [float(batch["statistic"]) if "statistic" in batch else None for batch in batches], len(extra)


def on_one_rank(objective):
    return StepMedian(objective, Parallel(torch.device("cpu")))


def test_step_median_exact_is_over_all_micro_batches():
    median = on_one_rank(TALR("exact"))
    assert run(median, batch_of(1.0, 5.0), batch_of(2.0, 9.0)) == ([3.5, 3.5], 2)
    assert run(median, batch_of(1.0, 5.0, 7.0)) == ([5.0], 0)  # one micro-batch needs no extra forward
    assert median.last is None


def test_step_median_lagged_is_of_the_step_before():
    median = on_one_rank(TALR("lagged"))
    assert run(median, batch_of(1.0, 5.0), batch_of(2.0, 9.0)) == ([3.5, 3.5], 2)  # the first step's own
    assert run(median, batch_of(4.0), batch_of(6.0)) == ([3.5, 3.5], 0)
    assert run(median, batch_of(math.nan)) == ([5.0], 0)
    assert median.last == statistics.median([4.0, 6.0])  # the last finite one


def test_step_median_auto_is_exact_where_that_costs_nothing():
    assert StepMedian(TALR(), Parallel(torch.device("cpu")), micro_batches=2).mode == "lagged"
    for last, mode in ((None, "exact"), (2.0, "lagged")):  # whatever the micro-batches, a resumed run stays what it was
        for number in (1, 2):
            resumed = StepMedian(TALR(), Parallel(torch.device("cpu")), number, {"median": last})
            assert resumed.mode == mode
    median = on_one_rank(TALR())
    assert run(median, batch_of(1.0, 5.0, 7.0)) == ([5.0], 0)
    assert median.metrics() == {"tau": 5.0}
    assert run(median, batch_of(2.0)) == ([2.0], 0)


@pytest.mark.parametrize("objective", [TALR(2.0), CrossEntropy()])
def test_step_median_does_nothing_without_a_statistic(objective):
    assert run(on_one_rank(objective), batch_of(1.0)) == ([None], 0)
