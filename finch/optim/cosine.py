"""torchtune's cosine schedule, with a warm-up that is a share of the run: the same block fits a run of any length."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_with_warmup(
    optimizer: Optimizer,
    num_training_steps: int,
    last_epoch: int = -1,
    warmup_fraction: float = 0.05,
    num_cycles: float = 0.5,
) -> LambdaLR:
    """A linear rise from 0 to the optimizer's lr, then a cosine down to 0 at the run's end.

    Args:
        num_training_steps: optimizer steps of the whole run.
        last_epoch: as in torch's schedulers.
        warmup_fraction: the rise's share of them, in [0, 1), rounded to whole steps; the paper's baselines rise over 0.05.
        num_cycles: waves of the cosine; half a one ends at 0.

    Raises:
        ValueError: warmup_fraction lies outside its range.
    """
    from torchtune.training.lr_schedulers import (
        get_cosine_schedule_with_warmup,  # this package imports with torch alone
    )

    if not (isinstance(warmup_fraction, (int, float)) and 0 <= warmup_fraction < 1):
        raise ValueError(f"warmup_fraction={warmup_fraction!r} must lie in [0, 1): it is a share of the run's steps")
    return get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=round(warmup_fraction * num_training_steps),
        num_training_steps=num_training_steps,
        num_cycles=num_cycles,
        last_epoch=last_epoch,
    )
