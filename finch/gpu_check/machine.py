"""Phase 0: rates of this machine: matrix products at the model's shapes, copies, an all-reduce over the ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from finch.distributed.parallel import local_device
from finch.gpu_check.models import BATCH, TOKENS, large_models
from finch.gpu_check.processes import Ranks
from finch.gpu_check.report import Check

_ROW_TOKENS = BATCH * sum(TOKENS) // 2
_LONG_TOKENS = 8 * 4096


def run(check: Check) -> None:
    device = torch.device(check.device)
    is_cpu = check.device == "cpu"
    for dtype, tokens in ((torch.bfloat16, _ROW_TOKENS), (torch.bfloat16, _LONG_TOKENS), (torch.float32, _ROW_TOKENS)):
        if is_cpu and dtype == torch.bfloat16:  # emulated
            continue
        name = f"matrix products, {tokens:,} tokens, {str(dtype).removeprefix('torch.')}, TFLOP/s"
        with check.case(name):
            check.measured(name, matrix_rate(device, dtype, tokens))
    size = 2**24 if is_cpu else 2**30
    with check.case("copy"):
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = seconds_per_call(lambda: target.copy_(source), device)
        check.measured("copy on the device, GB/s read and written", 2 * size / seconds / 1e9)
    if check.ranks == 1:
        check.not_run("all-reduce", "one GPU")
        return
    with check.case("all-reduce"):
        arguments = {"device": check.device, "size": size, "file": str(check.folder / "all_reduce.txt")}
        running = Ranks("all_reduce", "finch.gpu_check.machine:all_reduce", arguments, check.folder, ranks=check.ranks)
        running.wait(check.end)
        if any(running.codes):
            raise RuntimeError(running.last_lines())
        rate = float((check.folder / "all_reduce.txt").read_text())
        check.measured(f"all-reduce over {check.ranks} ranks, GB/s sent by each in a ring", rate)


def matrix_rate(device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """TFLOP/s of products at the shapes of B's layers, [tokens, inputs] with [inputs, outputs], all in turn."""
    shapes = large_models(device.type)[0].products()
    pairs = [
        (torch.randn(tokens, inputs, dtype=dtype, device=device), torch.randn(inputs, outputs, dtype=dtype, device=device))
        for inputs, outputs in shapes
    ]  # fmt: skip
    seconds = seconds_per_call(lambda: [one @ other for one, other in pairs], device)
    return sum(2 * tokens * inputs * outputs for inputs, outputs in shapes) / seconds / 1e12


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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(device: str, size: int, file: str) -> None:
    """On each rank; rank 0 writes the rate in GB/s."""
    place = local_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=place if device == "cuda" else None)
    values = torch.zeros(size // 4, device=place)
    synchronize(place)
    for _ in range(2):
        dist.all_reduce(values)
    synchronize(place)
    start, number = time.perf_counter(), 5
    for _ in range(number):
        dist.all_reduce(values)
    synchronize(place)
    ranks = dist.get_world_size()
    rate = number * 2 * (ranks - 1) / ranks * size / (time.perf_counter() - start) / 1e9
    if os.environ["RANK"] == "0":
        with open(file, "w", encoding="utf-8") as output:
            output.write(str(rate))
    dist.barrier()
