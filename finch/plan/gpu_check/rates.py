"""How often a call runs on a device. Needs no torchtune, whose import takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from finch.distributed.parallel import local_device


def seconds_per_call(call: Callable[[], object], limit_s: float = 0.5) -> float:
    """The mean over as many calls as take ``limit_s``, after a warm-up; the device is waited for."""
    timer = _timer(call)
    return timer.timeit(max(1, int(limit_s / timer.timeit(1).mean))).mean


def matmul_rate(
    tokens: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> float:
    """FLOP per second of products of [tokens, inputs] with [inputs, outputs], all ``shapes`` in turn."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    pairs = [(draw(tokens, inputs), draw(inputs, outputs)) for inputs, outputs in shapes]
    seconds = seconds_per_call(lambda: [one @ other for one, other in pairs])
    return sum(2 * tokens * inputs * outputs for inputs, outputs in shapes) / seconds


def _timer(call: Callable[[], object]) -> Timer:
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def all_reduce(device: str, size: int, file: str) -> None:
    """On each rank: all-reduces of ``size`` bytes; rank 0 writes what each rank sends in a ring, in GB/s."""
    place = local_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=place if device == "cuda" else None)
    values = torch.zeros(size // 4, device=place)
    seconds = _timer(lambda: dist.all_reduce(values)).timeit(5).mean  # as many on each rank
    ranks = dist.get_world_size()
    rate = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    if os.environ["RANK"] == "0":
        Path(file).write_text(str(rate), encoding="utf-8")
    dist.barrier()
