"""``init="dataset"`` for transformers' Trainer: the pretrained model's mean loss over the training rows."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset

from finch.errors import UserError
from finch.integrations.causal_lm import LossReader
from finch.integrations.step_loss import StepLoss


@torch.no_grad()
def mean_dataset_loss(model: nn.Module, loader: Any, batch_size: int, device: torch.device) -> tuple[float, int]:
    """One pass in evaluation mode over the rows of a loader, each once, shared by the ranks.

    The pass has a loader of its own, without shuffling, so that the training order and the global random state stay as they are. Every
    rank runs the same number of forward passes, since those of a sharded model are collective.

    Args:
        model: as the Trainer calls it.
        loader: the Trainer's, for its dataset and collator.
        batch_size: rows a forward pass on each rank.
        device: of the batches.

    Returns:
        Mean over the target tokens in nats, and their number; the same on every rank.

    Raises:
        UserError: the dataset has no length, or no target tokens.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(
            f"init=dataset: {type(dataset).__name__} has no length, so a pass over all rows may never end; pass the mean loss as a number, "
            "or init='first_batch'"
        )
    is_parallel = distributed.is_available() and distributed.is_initialized()
    rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if is_parallel else (0, 1)
    starts = range(rank * batch_size, len(dataset) + rank * batch_size, batch_size * num_ranks)
    shares = [list(range(start, min(start + batch_size, len(dataset)))) for start in starts]
    rows = DataLoader(
        dataset,
        batch_sampler=[share or [0] for share in shares],  # without rows of its own: any row, not counted
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        generator=torch.Generator(),
    )
    step_loss, reader = StepLoss(), LossReader()
    was_training = model.training
    model.eval()
    for share, batch in zip(shares, rows, strict=True):
        batch = send_to_device(batch, device)
        loss_sum, num_targets = reader.read(model(**batch), batch)
        step_loss.update(loss_sum, num_targets if share else 0)
    model.train(was_training)
    loss, num_targets = step_loss.compute()
    if num_targets == 0:
        raise UserError(
            "init=dataset: the training rows have no target token (label -100 everywhere); check the data collator"
        )
    return float(loss), int(num_targets)
