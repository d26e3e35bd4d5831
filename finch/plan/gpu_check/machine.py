"""Phase 0: rates of this machine: matrix products at the model's shapes, copies, an all-reduce over the ranks."""

from __future__ import annotations

import functools

import torch

from finch.plan.estimate.step_time import ALL_REDUCE, COLLECTIVE, COPY, LAUNCH, MATRIX_PRODUCTS
from finch.plan.gpu_check.host import host_rates
from finch.plan.gpu_check.models import BATCH, QWEN3_4B, TINY, TOKENS
from finch.plan.gpu_check.processes import Ranks
from finch.plan.gpu_check.rates import matmul_rate, seconds_per_call
from finch.plan.gpu_check.report import Check

_ROW_TOKENS, _LONG_TOKENS = BATCH * sum(TOKENS) // 2, 8 * 4096


def run(check: Check) -> None:
    device, is_cpu = torch.device(check.device), check.device == "cpu"
    measures = {COPY: functools.partial(copy_rate, device)}
    measures |= {
        name: functools.partial(_host_rate, check.device, number) for number, name in enumerate((LAUNCH, COLLECTIVE))
    }
    for dtype, tokens in ((torch.float32, _ROW_TOKENS), (torch.bfloat16, _ROW_TOKENS), (torch.bfloat16, _LONG_TOKENS)):
        name = f"{MATRIX_PRODUCTS} {tokens:,} tokens, {str(dtype).removeprefix('torch.')}, TFLOP/s"
        if is_cpu and dtype == torch.bfloat16:
            check.not_run(name, "a CPU may emulate bf16")
        else:
            measures[name] = functools.partial(matrix_rate, device, dtype, tokens)
    name = f"{ALL_REDUCE} {check.ranks} ranks, GB/s sent by each in a ring"
    if check.ranks == 1:
        check.not_run(name, "one GPU")
    else:
        measures[name] = functools.partial(all_reduce_rate, check)
    for name, measure in measures.items():
        with check.case(name):
            check.measured(name, measure())


def all_reduce_rate(check: Check) -> float:
    file = check.folder / "all_reduce.txt"
    arguments = {"device": check.device, "size": _num_bytes(torch.device(check.device)), "file": str(file)}
    running = Ranks("all_reduce", "finch.plan.gpu_check.rates:all_reduce", arguments, check.folder, ranks=check.ranks)
    running.finish(check.end)
    if any(running.codes):
        raise RuntimeError(running.last_lines())
    return float(file.read_text(encoding="utf-8"))


def copy_rate(device: torch.device) -> float:
    """GB/s that are read and written."""
    source = torch.empty(_num_bytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_per_call(lambda: target.copy_(source)) / 1e9


def _host_rate(device: str, number: int) -> float:
    return host_rates(device)[number]


def _num_bytes(device: torch.device) -> int:
    return 2**24 if device.type == "cpu" else 2**30


def matrix_rate(device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """TFLOP/s of products of [tokens, inputs] with [inputs, outputs] at the shapes of a layer of Qwen3-4B, all in turn; of a tiny model on a CPU."""
    model = TINY["Q"] if device.type == "cpu" else QWEN3_4B
    width, middle = model.sizes["embed_dim"], model.sizes["intermediate_dim"]
    q, kv = (model.sizes[name] * model.head_dim for name in ("num_heads", "num_kv_heads"))
    shapes = [(width, q), (width, kv), (width, kv), (q, width), (width, middle), (width, middle), (middle, width)]
    return matmul_rate(tokens, shapes, dtype, device.type) / 1e12
