"""Llama and Qwen3 in plain torch, row by row: what a training step is compared with. Shares no code with the models that finch trains."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from finch.objectives import IGNORE_INDEX
from finch.plan.gpu_check.models import Model, Row, Weights


def plain_step(model: Model, weights: Weights, rows: list[Row], dtype: torch.dtype) -> tuple[float, Weights]:
    """The mean loss of the target tokens in nats, and its gradients in fp64 on the host, with products in ``dtype``; norms, softmax and loss
    are computed in at least fp32."""
    leaves = {name: weight.detach().to(dtype).requires_grad_() for name, weight in weights.items()}
    losses = torch.cat([_token_losses(model, leaves, row) for row in rows])
    mean = losses.mean()
    gradients = torch.autograd.grad(mean, list(leaves.values()))
    named = zip(leaves, gradients, strict=True)
    return float(mean.detach()), {name: gradient.to("cpu", torch.float64) for name, gradient in named}


def relative_error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is exact; infinite for NaN."""
    return float(((seen.double() - exact).norm() / exact.norm()).nan_to_num(nan=torch.inf))


def worst_loss(seen: Iterable[float], exact: Iterable[float]) -> float:
    """The largest relative error; NaN if one is, which Python's max drops."""
    return float(torch.tensor([abs(one - other) / other for one, other in zip(seen, exact, strict=True)]).max())


def _token_losses(model: Model, weights: Weights, row: Row) -> torch.Tensor:
    labels = torch.tensor(row["labels"], device=weights["tok_embeddings.weight"].device)[1:]
    is_target = labels != IGNORE_INDEX
    logits = _wide(plain_logits(model, weights, row["tokens"], torch.nn.functional.pad(is_target, (0, 1))))
    return -logits.log_softmax(-1).gather(-1, labels[is_target, None])[:, 0]


def plain_logits(model: Model, weights: Weights, row: list[int], where: torch.Tensor | slice) -> torch.Tensor:
    """[positions, vocab] after the tokens of ``row`` at ``where``."""
    sizes, eps = model.sizes, model.sizes.get("norm_eps", 1e-6)
    tokens = torch.tensor(row, device=weights["tok_embeddings.weight"].device)
    hidden = weights["tok_embeddings.weight"][tokens]
    for number in range(sizes["num_layers"]):
        start = f"layers.{number}."
        layer = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
        hidden = hidden + _attention(model, layer, _norm(hidden, layer["sa_norm.scale"], eps))
        normed = _norm(hidden, layer["mlp_norm.scale"], eps)
        gate = torch.nn.functional.silu(normed @ layer["mlp.w1.weight"].T)
        hidden = hidden + (gate * (normed @ layer["mlp.w3.weight"].T)) @ layer["mlp.w2.weight"].T
    head = weights.get("output.weight", weights["tok_embeddings.weight"])
    return _norm(hidden, weights["norm.scale"], eps)[where] @ head.T


def _attention(model: Model, layer: Weights, hidden: torch.Tensor) -> torch.Tensor:
    seq, eps = len(hidden), model.sizes.get("norm_eps", 1e-6)
    q, k, v = ((hidden @ layer[f"attn.{name}_proj.weight"].T).view(seq, -1, model.head_dim) for name in "qkv")
    if "attn.q_norm.scale" in layer:
        q, k = _norm(q, layer["attn.q_norm.scale"], eps), _norm(k, layer["attn.k_norm.scale"], eps)
    base, rotates_halves = float(model.sizes.get("rope_base", 1e6)), "qwen3" in model.component
    q, k = _rotate(q, base, rotates_halves), _rotate(k, base, rotates_halves)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = _wide(torch.einsum("qhd,khd->hqk", q, k)) * model.head_dim**-0.5
    future = torch.ones(seq, seq, dtype=torch.bool, device=hidden.device).triu(1)
    shares = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ layer["attn.output_proj.weight"].T


def _norm(hidden: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    wide = _wide(hidden)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * _wide(scale)).to(hidden.dtype)


def _rotate(heads: torch.Tensor, base: float, rotates_halves: bool) -> torch.Tensor:
    """``heads``: [seq, heads, head_dim]. Angles are fp32, as all of these models have them."""
    size = heads.shape[-1]
    frequencies = 1.0 / (base ** (torch.arange(0, size, 2, device=heads.device).float() / size))
    angles = torch.arange(len(heads), device=heads.device).float()[:, None] * frequencies
    wide = _wide(heads)
    cosine, sine = (each.to(wide.dtype)[:, None] for each in (angles.cos(), angles.sin()))
    one, other = wide.chunk(2, -1) if rotates_halves else wide.unflatten(-1, (-1, 2)).unbind(-1)
    parts = one * cosine - other * sine, other * cosine + one * sine
    rotated = torch.cat(parts, -1) if rotates_halves else torch.stack(parts, -1).flatten(-2)
    return rotated.to(heads.dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
