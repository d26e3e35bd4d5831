"""The rate of fp32 matrix products at a model's own shapes, measured beside the contenders."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


def matmul_rate(tokens: int, shapes: Sequence[tuple[int, int]], seconds: float = 3.0) -> float:
    """FLOP a second of products of [tokens, inputs] with [inputs, outputs], all ``shapes`` in turn.

    Args:
        shapes: (inputs, outputs) of the model's linear layers.
    """
    pairs = [(torch.randn(tokens, inputs), torch.randn(inputs, outputs)) for inputs, outputs in shapes]
    for one, other in pairs:
        one @ other
    flops, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for one, other in pairs:
            one @ other
            flops += 2 * one.shape[0] * one.shape[1] * other.shape[1]
    return flops / elapsed
