"""Batch and dtype for the device of a run."""

from __future__ import annotations

from typing import Any

import torch

from finch.distributed import parallel

GLOBAL_BATCH = 16
"""Samples per optimizer step: the smaller of the paper's two (Appendix B.2)."""

_MICRO_BATCH = 4
_BF16_MIXED_BYTES = 16
"""Of fp32 weights and gradients, and AdamW's two fp32 moments, per parameter."""
_SHARE_FOR_STATE = 0.7
"""Of a GPU's memory; the rest is for activations and logits."""


def device_keys(device: str, num_parameters: int, num_rows: int | None) -> dict[str, Any]:
    """The keys that depend on the device: dtype, batch, activation checkpointing.

    On a GPU bf16_mixed, if weights, gradients and AdamW's moments in fp32 leave room for activations, else bf16; on a CPU fp32.

    Args:
        device: the config's: auto, cpu, cuda or cuda:N.
        num_parameters: of the model.
        num_rows: to train on; None: unknown.
    """
    local = parallel.local_device(device)
    ranks = parallel.launched_ranks()
    global_batch = min(GLOBAL_BATCH, num_rows or GLOBAL_BATCH)
    micro_batch = max(1, min(_MICRO_BATCH, global_batch // ranks))
    keys: dict[str, Any] = {
        "batch_size": micro_batch,
        "gradient_accumulation_steps": max(1, global_batch // (micro_batch * ranks)),
    }
    if local.type != "cuda":
        return {**keys, "dtype": "fp32", "enable_activation_checkpointing": False}
    memory = ranks * torch.cuda.get_device_properties(local).total_memory
    is_roomy = num_parameters * _BF16_MIXED_BYTES <= _SHARE_FOR_STATE * memory
    return {**keys, "dtype": "bf16_mixed" if is_roomy else "bf16", "enable_activation_checkpointing": True}
