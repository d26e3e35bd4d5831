"""finch's objectives as TorchTitan losses, where its loss seam allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs
from torchtitan.config import CompileConfig

from finch.dtensor import full_tensor
from finch.errors import UserError
from finch.objectives import DFT, EAFT, TALR, Objective


class ObjectiveLoss(BaseLoss):
    """A reweighted cross-entropy: sum(weight * token loss) / target tokens, with weights from :mod:`finch.objectives`.

    TorchTitan gives a loss the logits and labels of one micro-batch, or of one chunk of it. That is enough for DFT, for EAFT, and for TALR
    with a constant tau. FLOW and STM need the pretrained model's losses, and TALR's other forms the losses of the complete step: finch's
    recipe has them. FINCH follows the unweighted cross-entropy, which is collected here; validation reports it as well.

    Args:
        config: which objective.
        compile_config: TorchTitan's; the objective itself is not compiled.

    Raises:
        UserError: an argument is out of range, or does not belong to the objective.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        objective: Literal["DFT", "TALR", "EAFT"] = "DFT"
        """Which one; `finch.objectives` describes them."""

        tau: float | None = None
        """TALR's temperature in nats."""

        w_min: float = 0.01
        """TALR's least weight of a token."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.objective = build_objective(config)
        self._collected: torch.Tensor | None = None

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The share of these tokens in the step's loss.

        Args:
            pred: [batch, seq, vocab] logits.
            labels: [batch, seq], -100 where ignored.
            global_valid_tokens: [] of the step; None: the sum of the unweighted cross-entropy is returned.

        Returns:
            [] in nats, and no metrics.
        """
        token_loss = -full_tensor(compute_logprobs(pred, labels))
        token_sum = token_loss.detach().sum(dtype=torch.float64)
        if global_valid_tokens is None:
            return token_sum.float(), {}
        if self._collected is None:
            self._collected = torch.zeros_like(token_sum)
        self._collected.add_(token_sum)  # in place, so that a CUDA graph repeats it
        batch = {"labels": labels}
        if "top_logits" in self.objective.needs:
            batch["top_logits"] = full_tensor(pred).detach().topk(EAFT.num_logits).values
        weight = self.objective.weights(token_loss.detach(), batch)
        return (weight * token_loss).sum() / global_valid_tokens, {}

    def pop_cross_entropy(self) -> torch.Tensor:
        """[] fp64, the sum of the unweighted cross-entropy since the last call, in nats."""
        assert self._collected is not None
        result = self._collected.clone()
        self._collected.zero_()
        return result


def build_objective(config: ObjectiveLoss.Config) -> Objective:
    """
    Raises:
        UserError: see :class:`ObjectiveLoss`.
    """
    if config.objective == "TALR":
        if config.tau is None:
            raise UserError(
                "loss.tau=None: the median of a step's losses, TALR's tau, cannot be known inside TorchTitan's loss; give a number of nats"
            )
        try:
            return TALR(config.tau, config.w_min)
        except ValueError as error:
            raise UserError(f"loss: {error}") from error
    if config.tau is not None:
        raise UserError(f"loss.tau={config.tau} belongs to TALR, and loss.objective={config.objective}; remove it")
    if config.objective not in ("DFT", "EAFT"):
        raise UserError(
            f"loss.objective={config.objective} must be DFT, TALR or EAFT: what the others need is not known inside TorchTitan's loss"
        )
    return DFT() if config.objective == "DFT" else EAFT()


def objective_of(loss: BaseLoss) -> ObjectiveLoss | None:
    """The ObjectiveLoss that a loss is, or applies to its chunks."""
    inner = loss.loss_fn if isinstance(loss, ChunkedLossWrapper) else loss
    return inner if isinstance(inner, ObjectiveLoss) else None
