"""How often a call runs on a device. Needs no torchtune, whose import takes seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from finch.distributed.parallel import local_device


def seconds_per_call(call: Callable[[], object], device: torch.device, limit_s: float = 0.5) -> float:
    """The mean over as many calls as take ``limit_s``, after a warm-up; the device is waited for."""

    def seconds(number: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        synchronize(device)
        return time.perf_counter() - start

    call()
    number = max(1, int(limit_s / max(seconds(1), 1e-6)))
    return seconds(number) / number


def synchronize(device: torch.device) -> None:
    """Waits for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(device: str, size: int, file: str) -> None:
    """On each rank: all-reduces of ``size`` bytes; rank 0 writes what each rank sends in a ring, in GB/s."""
    place, number = local_device(device), 5
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=place if device == "cuda" else None)
    values = torch.zeros(size // 4, device=place)
    dist.all_reduce(values)
    synchronize(place)
    start = time.perf_counter()
    for _ in range(number):  # as many on each rank
        dist.all_reduce(values)
    synchronize(place)
    ranks = dist.get_world_size()
    rate = number * 2 * (ranks - 1) / ranks * size / (time.perf_counter() - start) / 1e9
    if os.environ["RANK"] == "0":
        Path(file).write_text(str(rate), encoding="utf-8")
    dist.barrier()
