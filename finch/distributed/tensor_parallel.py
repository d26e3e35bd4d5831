"""Tensor parallelism: a plan's matrices sharded over the ranks of a group, in torchtune's form of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchtune.modules import MultiHeadAttention, TiedLinear, TransformerDecoder
from torchtune.training import prepare_mha_for_tp

from finch.base.errors import UserError

Plan = Mapping[str, ParallelStyle]
"""From module names, ``*`` for the number of a layer, to styles of torch's tensor parallelism."""


def check_plan(decoder: TransformerDecoder, plan: Plan, size: int) -> None:
    """Checks that a plan fits a model on the ``size`` ranks of a tensor-parallel group.

    Raises UserError for a pattern that no module has, a projection of the attention that none names, a model that cannot be sharded,
    heads that do not divide, and weights within a head that the plan leaves out, whose gradients would cover only this rank's heads.
    """
    names = [name for name, _ in decoder.named_modules() if name]
    tied = isinstance(decoder.output, TiedLinear)  # no module: it is sharded with the embedding
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names) and not (tied and pattern == "output"):
            raise UserError(
                f"tensor_parallel_plan names {pattern}, which the model does not have; give the plan of this model's family"
            )
    attention = decoder.layers[0].attn
    if not isinstance(attention, MultiHeadAttention) or (tied and type(decoder.output) is not TiedLinear):
        raise UserError(
            f"tensor_parallel_dim={size} is not supported for this model, whose attention or output layer torchtune does not shard; set it to 1"
        )
    for part in ("q_proj", "k_proj", "v_proj", "output_proj"):
        if not any(_matches(f"layers.0.attn.{part}", pattern) for pattern in plan):
            raise UserError(
                f"tensor_parallel_plan leaves out layers.*.attn.{part}; heads are sharded in all four projections, add it"
            )
    for what, heads in (("attention heads", attention.num_heads), ("key-value heads", attention.num_kv_heads)):
        if heads % size:
            raise UserError(f"tensor_parallel_dim={size} does not divide the model's {heads} {what}; give a divisor")
    for name, module in decoder.named_modules():
        # A norm without weights has no gradient that could be incomplete.
        within_heads = name.endswith((".attn.q_norm", ".attn.k_norm")) and any(True for _ in module.parameters())
        if within_heads and not any(_matches(name, pattern) for pattern in plan):
            raise UserError(
                f"tensor_parallel_plan leaves out {name}, which sees only this rank's heads; for Qwen3 use finch.models.qwen3.qwen3_tp_plan"
            )


def apply_plan(decoder: TransformerDecoder, plan: Plan, mesh: DeviceMesh) -> None:
    """Shards the plan's modules over ``mesh``, in place, and an output layer that is tied to the embedding with it."""
    tied = isinstance(decoder.output, TiedLinear)
    prepare_mha_for_tp(decoder, mesh)
    parallelize_module(decoder, mesh, {name: style for name, style in plan.items() if not (tied and name == "output")})
    if tied and isinstance(decoder.tok_embeddings.weight, DTensor):
        decoder.output = _TiedOutput(decoder.tok_embeddings, mesh)


class _TiedOutput(TiedLinear):
    """The output layer over an embedding whose rows are sharded: each rank computes the logits of its tokens, all get all."""

    def __init__(self, embedding: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(embedding)
        self.mesh = mesh

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden``: [..., embed], the same on every rank. Returns [..., vocab]."""
        # Replicated: its gradient is summed over the ranks.
        replicated = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        logits: Any = F.linear(replicated, self.tied_module.weight)  # a DTensor, sharded along the vocabulary
        return logits.redistribute(placements=[Replicate()]).to_local()


def _matches(name: str, pattern: str) -> bool:
    """Whether torch's parallelize_module would match a name: part by part between the dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(fnmatch(part, glob) for part, glob in zip(parts, patterns, strict=True))
