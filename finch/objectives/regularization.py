"""Penalties on how far the model has moved from the pretrained one: L2 on the parameters, KL on the next-token distributions.

L2 is added to gradients and not to the loss:

    P = strength * sum_j (theta_j - theta0_j)^2        "sum"
        strength * sum_j (theta_j - theta0_j)^2 / 2    "half"
        strength * mean_j (theta_j - theta0_j)^2       "mean", over all parameters of the model

Li et al., "Explicit Inductive Bias for Transfer Learning with Convolutional Networks" (2018, arXiv 1802.01483), call it L2-SP. The
three forms differ only by a factor. Under "mean" that factor is so small for a large model that a strength made for the others does
nothing.

KL is a term of the loss:

    KL_t = sum_v p0(v) (log p0(v) - log p(v))        p0: the pretrained model's distribution of token t, p: the trained model's
    loss = objective + strength * mean of KL_t over the target tokens of the step

With plain cross-entropy this is SFT with a KL term, with DFT's weights it is ASFT: Zhu et al., "Anchored Supervised Fine-Tuning" (2025,
arXiv 2509.23753). Logits are [tokens, vocab] everywhere; KL_t is in nats, fp32 (fp64 for fp64 logits).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from finch.base import dtensor

FORMS = ("sum", "half", "mean")
REFERENCES = ("online", "cached")
DEFAULT_TOP_K = 64

_IsSharded = tuple[bool, ...]  # for each dimension of a parameter's mesh, whether the ranks hold different parts of it


class L2:
    """Adds the penalty's gradient to the gradients of a step, on each rank's own shards.

        penalty = L2(strength=1e-3)
        penalty.start(model.named_parameters())   # with the pretrained weights in place
        for batch in loader:
            model(batch).backward()
            metrics = penalty.add_gradients()     # once per optimizer step, before clipping
            optimizer.step()

    The penalty stays out of the loss: its gradient needs no backward, no gathered parameters and no graph, and the
    loss that is logged, or sets FINCH's learning rate, stays cross-entropy.

    theta0 costs as much memory as this rank's part of the trainable parameters.

    Args:
        strength: at least 0; 0 leaves the gradients as they are, and the distance is still measured.
        form: ``"sum"``, ``"half"`` or ``"mean"``.
        offload: keep theta0 on the CPU, pinned for parameters on CUDA. It is then copied to the device once per step.

    Raises ValueError if an argument is out of range.
    """

    def __init__(self, strength: float = 1e-3, form: str = "sum", offload: bool = False) -> None:
        self.strength = _checked_strength(strength, "1e-3")
        if form not in FORMS:
            raise ValueError(f"form={form!r} must be 'sum', 'half' or 'mean'")
        if not isinstance(offload, bool):
            raise ValueError(f"offload={offload!r} must be True or False")
        self.form = form
        self.offload = offload
        self._pretrained: list[tuple[nn.Parameter, torch.Tensor]] = []  # each with this rank's part of its theta0
        self._num_parameters = 0

    @torch.no_grad()
    def start(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copies the present values of the trainable parameters as theta0. Raises ValueError if none is trainable.

        ``parameters``: all of the model's with their names, sharded or not, each tensor once. Frozen ones count only in the mean, where they
        add 0.
        """
        self._pretrained, self._num_parameters = [], 0
        for _, parameter in parameters:
            self._num_parameters += parameter.numel()
            if parameter.requires_grad:
                self._pretrained.append((parameter, self._empty_like(parameter).copy_(dtensor.to_local(parameter))))
        if not self._pretrained:
            raise ValueError("parameters=[] holds nothing trainable: give the model's named parameters before training")

    @torch.no_grad()
    def add_gradients(self) -> dict[str, torch.Tensor]:
        """Adds the penalty's gradient to every ``grad``; a parameter without one gets one.

        Call it once per optimizer step, after all its backwards, which have averaged over ranks, and before clipping.
        All ranks must call it: it sums one number over each mesh. The host does not wait for the device.

        Returns ``l2_penalty`` and ``distance``, ||theta - theta0||_2 over all shards before the update; [], float64. Raises RuntimeError if
        ``start`` was not called.
        """
        if not self._pretrained:
            raise RuntimeError("L2.start was not called: give it the model's named parameters before training")
        slope = {"sum": 2.0, "half": 1.0, "mean": 2.0 / self._num_parameters}[self.form] * self.strength
        norms: dict[DeviceMesh | None, dict[_IsSharded, list[torch.Tensor]]] = {}
        for parameter, pretrained in self._pretrained:
            local = dtensor.to_local(parameter)
            # theta0 - theta, in the one temporary that also upcasts and uploads theta0.
            dtype = torch.promote_types(local.dtype, torch.float32)
            difference = pretrained.to(local.device, dtype, non_blocking=True, copy=True).sub_(local)
            mesh, is_sharded = _layout(parameter)
            norms.setdefault(mesh, {}).setdefault(is_sharded, []).append(torch.linalg.vector_norm(difference))
            if self.strength > 0:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dtensor.to_local(parameter.grad).add_(difference, alpha=-slope)
        total = torch.stack([_sum_of_squares(mesh, groups) for mesh, groups in norms.items()]).sum()
        return {"l2_penalty": total * (slope / 2), "distance": total.sqrt()}

    def _empty_like(self, parameter: torch.Tensor) -> torch.Tensor:
        local = dtensor.to_local(parameter)
        if not self.offload:
            return torch.empty_like(local)
        return torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")


def _layout(parameter: torch.Tensor) -> tuple[DeviceMesh | None, _IsSharded]:
    if not isinstance(parameter, DTensor):
        return None, ()
    return parameter.device_mesh, tuple(not isinstance(placement, Replicate) for placement in parameter.placements)


def _sum_of_squares(mesh: DeviceMesh | None, norms: dict[_IsSharded, list[torch.Tensor]]) -> torch.Tensor:
    """The squares of all shards' norms on one mesh, each shard counted once; [], one collective.

    DTensor sums over the mesh dimensions that shard any parameter. A parameter that is replicated along such a dimension would be
    counted once for each copy, so its norm is divided by their number.
    """
    is_summed = [any(dimension) for dimension in zip(*norms, strict=True)]
    shares = []
    for is_sharded, group in norms.items():
        sizes = zip(() if mesh is None else mesh.shape, is_summed, is_sharded, strict=True)
        copies = math.prod(size for size, summed, sharded in sizes if summed and not sharded)
        shares.append(torch.stack(group).double().square().sum() / copies)
    total = torch.stack(shares).sum()
    if mesh is None:
        return total
    placements = [Partial() if summed else Replicate() for summed in is_summed]
    total = total.to(mesh.device_type, non_blocking=True)  # offloaded shards live on the CPU
    return dtensor.full_tensor(DTensor.from_local(total, mesh, placements, run_check=False))


def _checked_strength(strength: float, example: str) -> float:
    if isinstance(strength, bool) or not isinstance(strength, (int, float)):
        raise ValueError(f"strength={strength!r} must be a number, such as {example}")
    if not (strength >= 0 and math.isfinite(strength)):
        raise ValueError(f"strength={strength} must be finite and not below 0: give {example}, or 0 for no penalty")
    return float(strength)


class KL:
    """The settings of the KL penalty, a term of any objective; the loss that is logged, or sets FINCH's learning rate, stays cross-entropy.

    Args:
        strength: at least 0; ASFT's authors use 0.1. 0 leaves the gradients as they are, and the divergence is still measured.
        reference: ``"online"``: the pretrained model runs next to the trained one, the divergence is exact. ``"cached"``: its ``top_k``
            most likely tokens at each target token are computed once; all other tokens count as one, which gives a lower bound.
        top_k: tokens of a cached distribution; None: 64.

    Raises ValueError if an argument is out of range.
    """

    def __init__(self, strength: float = 0.1, reference: str = "online", top_k: int | None = None) -> None:
        self.strength = _checked_strength(strength, "0.1")
        if reference not in REFERENCES:
            raise ValueError(f"reference={reference!r} must be 'online' or 'cached'")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"top_k={top_k!r} must be a whole number above 0, such as {DEFAULT_TOP_K}")
        if top_k is not None and reference == "online":
            raise ValueError(f"top_k={top_k} belongs to reference='cached': reference='online' uses all tokens")
        self.reference = reference
        self.top_k = top_k or DEFAULT_TOP_K

    @property
    def is_online(self) -> bool:
        return self.reference == "online"


def token_kl(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL_t over the full vocabulary, [tokens] in nats; both logits are [tokens, vocab], the reference detached.

    The gradient is p - p0 as such: equal logits give exactly 0, value and gradient.
    """
    logits = _upcast(logits)
    with torch.no_grad():
        log_p, log_p0 = logits.log_softmax(-1), _upcast(reference_logits).log_softmax(-1)
        p0 = log_p0.exp()
        # In place here and below, since each tensor of [tokens, vocab] takes the memory of the logits once more.
        value = log_p0.sub_(log_p).mul_(p0).sum(-1)
        gradient = log_p.exp_().sub_(p0)
    return _WithGradient.apply(logits, value, gradient)


def top_log_probs(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution of a token, coarsened to its ``top_k`` most likely tokens and the rest, from logits [tokens, vocab].

    Returns log-probabilities [tokens, top_k + 1], the last that of all other tokens together, and the tokens [tokens, top_k] int64. With
    ``top_k`` equal to vocab the rest is empty.
    """
    logits = _upcast(logits.detach())
    top = logits.topk(top_k).indices
    return _coarsen(logits, top)[0], top


def coarse_token_kl(logits: torch.Tensor, log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """KL_t between distributions over the given tokens and the rest as one: a lower bound of ``token_kl``, equal with all tokens.

    ``logits``: [tokens, vocab] of the model in training; ``log_probs``: [tokens, top_k + 1] of the pretrained model and ``tokens``:
    [tokens, top_k], see :func:`top_log_probs`. Returns [tokens] in nats.
    """
    logits = _upcast(logits)
    with torch.no_grad():
        log_q0, top = log_probs.to(logits.dtype), tokens.long()
        q0 = log_q0.exp()
        log_q, log_p, rest = _coarsen(logits, top)
        # An empty rest adds nothing: 0 * (-inf) would be NaN.
        value = torch.where(q0 > 0, q0 * (log_q0 - log_q), 0.0).sum(-1)
        # p - p0 at the top tokens. Elsewhere the rest's mass is shared as the trained model shares it: p - q0_rest * p / q_rest.
        gradient = log_p.exp() - q0[:, -1:] * rest
        gradient.scatter_add_(-1, top, -q0[:, :-1])
    return _WithGradient.apply(logits, value, gradient)


def _coarsen(logits: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens ``top`` and of the rest, [tokens, top_k + 1]; of all, [tokens, vocab]; and each token's share of
    the rest, [tokens, vocab], 0 at the top tokens."""
    log_p = logits.log_softmax(-1)
    outside = log_p.scatter(-1, top, -math.inf)  # summed directly: 1 - sum(top) would lose a small rest to rounding
    log_rest = outside.logsumexp(-1, keepdim=True)
    share = (outside - log_rest).exp().nan_to_num()  # an empty rest has -inf - -inf
    return torch.cat([log_p.gather(-1, top), log_rest], -1), log_p, share


class _WithGradient(torch.autograd.Function):
    """A value per token whose gradient with respect to the logits is already known: one [tokens, vocab] tensor is kept for it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output.unsqueeze(-1) * gradient, None, None


def _upcast(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
