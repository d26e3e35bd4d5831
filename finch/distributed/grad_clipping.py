"""The norm and the clipping of gradients that may be sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from finch.dtensor import full_tensor, group_by_mesh


def grad_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients over all shards, []; a collective where they are sharded."""
    groups = group_by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)
    norms = [full_tensor(nn.utils.get_total_norm(group)) for group in groups]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before, []."""
    parameters = list(parameters)
    norm = grad_norm(parameters)
    for group in group_by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def clip(parameters: Iterable[torch.Tensor], max_norm: float | None) -> torch.Tensor:
    """As :func:`clip_grad_norm`; None does not clip."""
    return grad_norm(parameters) if max_norm is None else clip_grad_norm(parameters, max_norm)
