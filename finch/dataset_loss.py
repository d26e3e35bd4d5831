"""A model's mean loss over a whole dataset: each sample once, every target token weighing the same, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from finch.data.loading import Batch, Samples, loader
from finch.data.order import GlobalOrder
from finch.errors import UserError
from finch.metrics import progress_bar
from finch.parallel import Parallel


@torch.no_grad()
def dataset_loss(
    model: nn.Module,
    samples: Samples,
    collate: Callable[[list[dict[str, Any]]], Batch],
    parallel: Parallel,
    *,
    batch_size: int,
    to_device: Callable[[Batch], Batch],
    num_workers: int = 0,
    title: str = "",
) -> float:
    """Token-weighted mean cross-entropy in nats.

    A loader of its own, in the dataset's order: no sampler padding counts a sample twice, nothing is dropped, and no
    random number that training would draw is consumed. Ranks that run out of samples go on with empty rows, since
    FSDP2's forward is a collective.

    Args:
        model: returns token losses, [batch, seq]; see :class:`finch.token_loss.TokenLoss`.
        batch_size: samples a forward pass and rank.
        title: of the progress bar; empty: no bar.

    Raises:
        UserError: no sample has a target token.
    """
    order = GlobalOrder(len(samples), micro_batch=batch_size, ranks=parallel.data_parallel_size, shuffle=False)
    batches = loader(samples, order, collate, rank=parallel.data_parallel_rank, num_workers=num_workers)
    # [sum of losses, number of target tokens]; fp64, for a sum over millions of tokens.
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    was_training = model.training
    model.eval()
    for batch in progress_bar(
        batches, desc=title, total=order.steps_per_epoch, unit="batch", disable=not (title and parallel.is_rank_zero)
    ):
        batch = to_device(batch)
        sums[0] += model(**batch).sum(dtype=torch.float64)
        sums[1] += batch["targets"].numel()
    model.train(was_training)
    total, targets = parallel.sum(sums).tolist()
    if targets == 0:
        raise UserError(
            f"{samples.key}: no sample of {samples.source} has a target token within tokenizer.max_seq_len; raise it, or check the template"
        )
    return total / targets
