"""TALR: DFT with a temperature that follows the loss of the batch, and a floor."""

from __future__ import annotations

import torch

from finch.objectives.base import Batch, Objective, positive_number, require_key, upcast


class TALR(Objective):
    """Weighs each token by max(p^(1/tau), w_min), with p its probability under the model in training, detached.

    Lin et al., "SFT Doesn't Always Hurt General Capabilities: Revisiting Domain-Specific Fine-Tuning in LLMs" (2025, arXiv
    2509.20758). TALR(tau=1, w_min=0) is DFT. The denominator is the number of target tokens.

    Where tau is not finite (no sequence of the step had a target, or the model has diverged) every weight is 1, so that a loss of
    0 stays 0 and a non-finite loss shows. At tau = 0 the weights are the limit: 1 where the loss is 0, w_min elsewhere.

    Args:
        tau: in nats. ``"exact"``: the median of f_s over the sequences of this step's batch, as in the paper; it must be known
            before the first backward, so with several micro-batches each forward runs twice. ``"lagged"``: the median of the
            step before, at no extra forward. ``"auto"``: exact where a step has one micro-batch, since it costs nothing there,
            else lagged. A number: constant.
        w_min: the least weight, in [0, 1].

    Raises:
        ValueError: an argument is out of range.
    """

    is_elementwise = True  # given tau

    def __init__(self, tau: str | float = "auto", w_min: float = 0.01) -> None:
        self._tau: float | None = None
        if isinstance(tau, str):
            if tau not in ("auto", "exact", "lagged"):
                raise ValueError(f"tau={tau!r} must be 'auto', 'exact', 'lagged' or a number of nats above 0")
            self.statistic = tau
        else:
            self._tau = positive_number("tau", tau, "a number of nats, or 'auto', 'exact' or 'lagged'")
        if not (isinstance(w_min, (int, float)) and 0 <= w_min <= 1):
            raise ValueError(f"w_min={w_min!r} must lie in [0, 1]: it is the least weight of a token, 0.01 by default")
        self.w_min = float(w_min)

    def weights(self, token_loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[batch, seq] in [w_min, 1].

        Raises:
            ValueError: tau is a statistic and the batch lacks ``statistic``.
        """
        losses = upcast(token_loss)
        if self._tau is not None:
            return torch.exp(-losses / self._tau).clamp(min=self.w_min)
        tau = torch.as_tensor(require_key(batch, "statistic", self), dtype=losses.dtype, device=losses.device)
        factors = torch.exp(-losses / tau.clamp(min=torch.finfo(losses.dtype).tiny)).clamp(min=self.w_min)
        return torch.where(tau.isfinite(), factors, 1.0)
