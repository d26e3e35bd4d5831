"""torchtune's cosine schedule with a warm-up given as a fraction of the run, so that one config fits runs of any length."""

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
    """Linear warm-up from 0 to the optimizer's lr, then cosine decay to 0 at the end of the run.

    Args:
        optimizer: whose learning rates are set.
        num_training_steps: optimizer steps of the run.
        last_epoch: as in torch's schedulers.
        warmup_fraction: of the steps, in [0, 1), rounded to a number of steps; 0.05 for the baselines of the FINCH paper.
        num_cycles: periods of the cosine; 0.5 ends at 0.

    Raises:
        ValueError: warmup_fraction is out of range.
    """
    # Imported here: this package must import with torch alone.
    from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

    if not (isinstance(warmup_fraction, (int, float)) and 0 <= warmup_fraction < 1):
        raise ValueError(f"warmup_fraction={warmup_fraction!r} must lie in [0, 1): it is a fraction of the run's steps")
    return get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=round(warmup_fraction * num_training_steps),
        num_training_steps=num_training_steps,
        num_cycles=num_cycles,
        last_epoch=last_epoch,
    )
