"""A model's token losses over a complete dataset, each sample once, on any number of ranks; and their mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from finch.data.dataset import Samples
from finch.data.loader import Batch, EvalLoader, model_inputs, to_device
from finch.distributed import watchdog
from finch.errors import UserError
from finch.progress import track


def iter_token_losses(model: nn.Module, loader: EvalLoader) -> Iterator[tuple[list[int], Batch, torch.Tensor]]:
    """This rank's share of a dataset in evaluation mode: row indices, their batch on the host, token losses [batch, seq] in nats."""
    return iter_outputs(model, loader)


@torch.no_grad()
def iter_outputs(model: nn.Module, loader: EvalLoader, **options: Any) -> Iterator[tuple[list[int], Batch, Any]]:
    """As :func:`iter_token_losses`; with ``options`` for the model's forward, whatever it then returns."""
    parallel = loader.parallel
    is_shown = bool(loader.title) and parallel.is_rank_zero
    was_training = model.training
    model.eval()
    for rows, batch in track(loader, title=loader.title, total=len(loader), unit="batch", is_shown=is_shown):
        watchdog.heartbeat()
        yield rows, batch, model(**model_inputs(to_device(batch, parallel.device)), **options)
    model.train(was_training)


@torch.no_grad()
def dataset_loss(model: nn.Module, loader: EvalLoader) -> float:
    """Token-weighted mean cross-entropy in nats; every target token weighs the same. Raises UserError if no sample has a target token."""
    # [sum of losses, number of target tokens]; fp64, for a sum over millions of tokens.
    sums = torch.zeros(2, dtype=torch.float64, device=loader.parallel.device)
    for _, batch, token_loss in iter_token_losses(model, loader):
        sums[0] += token_loss.sum(dtype=torch.float64)
        sums[1] += batch["targets"].numel()
    loss_sum, num_targets = loader.parallel.all_reduce_sum_(sums).tolist()
    if num_targets == 0:
        raise no_targets_error(loader.samples)
    return loss_sum / num_targets


def no_targets_error(samples: Samples) -> UserError:
    return UserError(
        f"{samples.key}: no sample of {samples.source} has a target token within tokenizer.max_seq_len; raise it, or check the template"
    )
