"""One optimizer step, on whatever model, loss and update: what the recipes, the estimate on fake tensors and the GPU check have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

from finch.data.loader import Batch, to_device
from finch.distributed import fsdp
from finch.distributed.parallel import Parallel
from finch.training.chunked_loss import TokenLoss
from finch.training.optimizer import Update
from finch.training.step_loss import StepLoss


class TrainStep:
    """An optimizer step over this rank's micro-batches. On CUDA with a fused optimizer FINCH reads nothing back to the host here.

    Args:
        device: of the batches, and of the sums of losses.
        reduces_each: whether FSDP2 reduces the gradients of each micro-batch, not only those of the last.
        on_gradients: called when the gradients are complete, before they are clipped.
    """

    def __init__(
        self,
        model: TokenLoss,
        loss: StepLoss,
        update: Update,
        parallel: Parallel,
        device: torch.device,
        *,
        reduces_each: bool,
        on_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.loss, self.update, self._parallel, self._device = model, loss, update, parallel, device
        self._reduces_each, self._on_gradients = reduces_each, on_gradients

    def __call__(self, batches: list[Batch]) -> dict[str, torch.Tensor | float | None]:
        """The step's line in the metrics, in nats where it is a loss; numbers or 0-d tensors. ``update_weight``: of its targets, 0: there is no update."""
        counts = self.loss.counts(batches).to(self._device, non_blocking=True)
        targets, denominator = self._parallel.all_reduce_sum_(counts).unbind()
        scale = self._parallel.data_parallel_size / denominator.clamp(min=1)  # undoes FSDP2's mean over ranks
        batches = [to_device(batch, self._device) for batch in batches]
        self.loss.start(self.model, batches, targets)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in fsdp.reduce_last(self.model, batches, each=self._reduces_each):
            token_loss, weighted = self.loss(self.model, batch, scale)
            loss_sum += token_loss.sum(dtype=torch.float64)
            if self.update.before_backward(loss_sum, targets, denominator):
                weighted.backward()
        loss = self.update.mean_loss(loss_sum, targets)
        regularizer = self.loss.add_gradients()
        self._on_gradients()
        norms = {"grad_norm": self.update.clip(), **regularizer}
        self.update.step(loss, norms["grad_norm"], denominator)
        self.loss.finish()
        metrics = {"loss": loss, **self.update.schedule.metrics(), **norms, **self.loss.metrics()}
        self.update.zero_grad()
        return {**metrics, "num_target_tokens": targets, "update_weight": denominator}
