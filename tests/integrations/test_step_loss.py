"""MeanLoss in one process; test_equality has its ranks."""

import math

import pytest
import torch
from helpers.ranks import on_ranks

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


def test_dtensors_count_whole(tmp_path):
    """4 nats over 10 tokens, also where a rank holds a part of them; the ranks' nats over one rank's tokens are refused."""
    code = """
        from finch.integrations.step_loss import MeanLoss
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate
        mesh, mean = init_device_mesh("cpu", (2,)), MeanLoss()
        def of(value, placement):
            return DTensor.from_local(torch.tensor(value), mesh, [placement])
        loss, found = of(1.0 + 2 * mesh.get_rank(), Partial("sum")), []
        for pair in ((loss, of(5, Partial("sum"))), (loss, of(10, Replicate())), (of(4.0, Replicate()), 10), (loss.to_local(), 5)):
            mean.update(*pair)
            found.append(float(mean.compute()[0]))
        try:
            mean.update(loss, 5)
        except TypeError as error:
            found.append(str(error))
        tell(found)
    """
    for *means, message in on_ranks(2, code, tmp_path):
        assert means == [0.4] * 4
        assert message.startswith(
            "MeanLoss.update(loss_sum, num_targets): one is a DTensor with placements=(Partial(sum),)"
        )
