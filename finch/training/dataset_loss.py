"""A model's losses over a whole dataset: each sample once, on any number of ranks; and their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from finch.data.loading import Batch, Samples, loader, model_inputs
from finch.data.order import GlobalOrder
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.metrics import progress_bar


@torch.no_grad()
def iter_token_losses(
    model: nn.Module,
    samples: Samples,
    collate: Callable[[list[dict[str, Any]]], Batch],
    parallel: Parallel,
    *,
    batch_size: int,
    to_device: Callable[[Batch], Batch],
    num_workers: int = 0,
    title: str = "",
) -> Iterator[tuple[list[int], Batch, torch.Tensor]]:
    """This rank's share of a dataset in evaluation mode: rows, their batch on the host, token losses [batch, seq] in nats.

    A loader of its own, in the dataset's order: no sampler padding counts a sample twice, nothing is dropped, and no
    random number that training would draw is consumed. Ranks that run out of samples go on with empty rows, since
    FSDP2's forward is a collective.

    Args:
        model: returns token losses; see :class:`finch.training.token_loss.TokenLoss`.
        batch_size: samples a forward pass and rank.
        title: of the progress bar; empty: no bar.
    """
    order = GlobalOrder(len(samples), micro_batch=batch_size, ranks=parallel.data_parallel_size, shuffle=False)
    rank = parallel.data_parallel_rank
    batches = loader(samples, order, collate, rank=rank, num_workers=num_workers)
    bar = progress_bar(
        batches, desc=title, total=order.steps_per_epoch, unit="batch", disable=not (title and parallel.is_rank_zero)
    )
    was_training = model.training
    model.eval()
    for rows, batch in zip(order.micro_batches(rank), bar, strict=True):
        watchdog.heartbeat()
        yield rows, batch, model(**model_inputs(to_device(batch)))
    model.train(was_training)


@torch.no_grad()
def dataset_loss(
    model: nn.Module,
    samples: Samples,
    collate: Callable[[list[dict[str, Any]]], Batch],
    parallel: Parallel,
    **options: Any,
) -> float:
    """Token-weighted mean cross-entropy in nats; every target token weighs the same. Arguments: see ``iter_token_losses``.

    Raises:
        UserError: no sample has a target token.
    """
    # [sum of losses, number of target tokens]; fp64, for a sum over millions of tokens.
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    for _, batch, token_loss in iter_token_losses(model, samples, collate, parallel, **options):
        sums[0] += token_loss.sum(dtype=torch.float64)
        sums[1] += batch["targets"].numel()
    total, targets = parallel.all_reduce_sum_(sums).tolist()
    if targets == 0:
        raise no_targets(samples)
    return total / targets


def no_targets(samples: Samples) -> UserError:
    return UserError(
        f"{samples.key}: no sample of {samples.source} has a target token within tokenizer.max_seq_len; raise it, or check the template"
    )
