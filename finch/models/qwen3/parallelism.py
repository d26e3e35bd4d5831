"""Qwen3's tensor-parallel plan."""

from __future__ import annotations

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel


def qwen3_tp_plan() -> dict[str, ParallelStyle]:
    """For ``tensor_parallel_plan``: heads and hidden units of the MLP are sharded, activations between layers are replicated.

    ``q_norm`` and ``k_norm`` normalise each head by itself with one scale for all heads: they work on this rank's heads
    (dimension 2 of [batch, seq, heads, head_dim]), and the scale's gradient is summed over the ranks.
    """
    per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.q_norm": per_head,
        "layers.*.attn.k_norm": per_head,
        "layers.*.attn.output_proj": RowwiseParallel(),
        "layers.*.mlp.w1": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(),
        "layers.*.mlp.w3": ColwiseParallel(),
    }
