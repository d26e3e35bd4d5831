"""Phase 1: ways to compute attention, each against float64: values and gradients; and what cuDNN's plans cost where lengths change."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from finch.data.padding_free import PaddingFree
from finch.gpu_check.models import BATCH, PREFIX, TOKENS, Model, medium_models
from finch.gpu_check.rates import synchronize
from finch.gpu_check.report import Check
from finch.training.padding_free_attention import padding_free_attention

Tensors = Sequence[torch.Tensor]
Attention = Callable[..., torch.Tensor]

# Times the error of fp32 mathematics rounded to the dtype: kernels round the scores as well, and the gradients of k and v are summed over
# the query heads that share them, and over the samples that share a prefix, in the dtype.
_FACTORS = (2.0, 4.0, 4.0, 4.0)
_FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1e-5}
_BACKENDS = {
    "math": SDPBackend.MATH,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
_NO_KERNEL = ("No available kernel", "No viable backend")
_PLAN_LENGTHS = range(41, 61)


def run(check: Check) -> None:
    dtypes = (torch.float32, torch.bfloat16) if check.quick else (torch.float32, torch.bfloat16, torch.float16)
    for model in medium_models(check.device).values():
        for dtype in dtypes:
            for prefix in (0, PREFIX):
                _compare(check, model, dtype, prefix)
    _time_plans(check)


def _compare(check: Check, model: Model, dtype: torch.dtype, prefix: int) -> None:
    """All ways on the same rows."""
    device, heads = torch.device(check.device), (model.sizes["num_heads"], model.sizes["num_kv_heads"])
    layout, generator = _layout(device, prefix), torch.Generator().manual_seed(0)
    tokens = prefix + sum(layout.lengths)

    def draw(number: int) -> torch.Tensor:
        return torch.randn(1, number, tokens, model.head_dim, generator=generator).to(device, dtype)

    q, k, v, upstream = (draw(number) for number in (heads[0], heads[1], heads[1], heads[0]))
    mask = visible(layout)

    def mathematics(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ _repeat(k, heads).mT * model.head_dim**-0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ _repeat(v, heads)

    truth = _with_gradients(mathematics, [each.double() for each in (q, k, v, upstream)])
    wide = _with_gradients(mathematics, [each.float() for each in (q, k, v, upstream)])
    limits = [
        max(factor * _error(each.to(dtype), exact), _FLOORS[dtype])
        for factor, each, exact in zip(_FACTORS, wide, truth, strict=True)
    ]
    for title, attention in _ways(layout, mask, heads, dtype).items():
        name = f"{model.name}, {str(dtype).removeprefix('torch.')}, prefix {prefix}: {title}"
        if isinstance(attention, str):
            check.not_run(name, attention)
            continue
        with check.case(name):
            try:
                seen = _with_gradients(attention, (q, k, v, upstream))
            except RuntimeError as error:
                if not any(sign in str(error) for sign in _NO_KERNEL):
                    raise
                check.not_run(name, "no such kernel for these inputs on this device")
                continue
            errors = [_error(each, exact) for each, exact in zip(seen, truth, strict=True)]
            worst = max(range(4), key=lambda index: errors[index] / limits[index])
            check.at_most(name, errors[worst], limits[worst], note=f"worst of {('output', 'dq', 'dk', 'dv')[worst]}")


def _ways(
    layout: PaddingFree, mask: torch.Tensor, heads: tuple[int, int], dtype: torch.dtype
) -> dict[str, Attention | str]:
    """Each takes q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim]; text: why it cannot be run."""
    is_cuda = mask.is_cuda

    def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return padding_free_attention(q, _repeat(k, heads), _repeat(v, heads), layout)

    def by(kind: SDPBackend) -> Attention:
        def attention(*qkv: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([kind]):
                return loop(*qkv)

        return attention

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, _repeat(k, heads), _repeat(v, heads), attn_mask=mask)

    ways: dict[str, Attention | str] = {"per-sample loop": loop, "one call with a mask": dense}
    ways |= {f"loop, {title}": by(kind) for title, kind in _BACKENDS.items()}
    kernel = _varlen_kernel(is_cuda, dtype)
    ways["varlen"] = kernel if isinstance(kernel, str) else _varlen(layout, kernel)
    if dtype == torch.bfloat16 and not layout.prefix:  # packed rows; each kind of rows compiles a kernel
        ways["flex"] = _flex(mask) if is_cuda else "flex attention has no backward on a CPU"
    return ways


def visible(layout: PaddingFree) -> torch.Tensor:
    """[T, T] bool: which tokens each token of the row attends to, from the definition."""
    device = layout.indices.device
    sample = torch.repeat_interleave(
        torch.arange(len(layout.lengths) + 1, device=device),
        torch.tensor([layout.prefix, *layout.lengths], device=device),
    )
    place = torch.arange(len(sample), device=device)
    return (place[:, None] >= place) & ((sample == 0) | (sample[:, None] == sample))


def _varlen_kernel(is_cuda: bool, dtype: torch.dtype) -> Attention | str:
    """torch's kernel for rows of unequal lengths with the arguments of the installed version; on a CPU plain torch in its place."""
    if not is_cuda:
        return _plain_varlen
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "this torch has no varlen_attn"
    if dtype == torch.float32:
        return "fp16 and bf16 only"
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    options |= {"enable_gqa": True} if "enable_gqa" in known else {}

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: Any) -> torch.Tensor:
        if "enable_gqa" not in known:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        output: Any = varlen_attn(q, k, v, *sizes, **options)
        return cast(torch.Tensor, output)

    return kernel


def _plain_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, *_: int
) -> torch.Tensor:
    """q [Tq, heads, head_dim], k and v [Tk, kv_heads, head_dim]; the mask is causal from the lower right corner, as the kernel's."""
    rows = zip(
        *(each.split(ends.diff().tolist()) for each, ends in ((q, ends_q), (k, ends_k), (v, ends_k))), strict=True
    )
    outputs = []
    for own_q, own_k, own_v in rows:
        causal = torch.ones(len(own_q), len(own_k), dtype=torch.bool).tril(len(own_k) - len(own_q))
        own_q, own_k, own_v = (each.transpose(0, 1) for each in (own_q, own_k, own_v))
        own = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=causal, enable_gqa=True)
        outputs.append(own.transpose(0, 1))
    return torch.cat(outputs)


def _varlen(layout: PaddingFree, kernel: Attention) -> Attention:
    """One call for all rows; each sample's keys are the prefix's, gathered once more for each sample, and its own."""
    device, prefix, lengths = layout.indices.device, layout.prefix, list(layout.lengths)
    starts = torch.tensor([prefix, *lengths]).cumsum(0).tolist()
    keys = [torch.arange(prefix)] * bool(prefix)
    for start, length in zip(starts, lengths, strict=False):
        keys.append(torch.cat([torch.arange(prefix), torch.arange(start, start + length)]))
    gathered = torch.cat(keys).to(device)
    sizes_q, sizes_k = [prefix] * bool(prefix) + lengths, [len(each) for each in keys]
    ends = [torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (sizes_q, sizes_k)]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [each[0].transpose(0, 1).contiguous() for each in (q, k, v)]
        output = kernel(rows[0], rows[1][gathered], rows[2][gathered], *ends, max(sizes_q), max(sizes_k))
        return output.transpose(0, 1)[None]

    return attention


def _flex(mask: torch.Tensor) -> Attention:
    size = len(mask)
    block_mask = create_block_mask(lambda _, __, row, column: mask[row, column], None, None, size, size, mask.device)
    call: Any = torch.compile(flex_attention)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = call(q, k, v, block_mask=block_mask, enable_gqa=True)
        return output

    return attention


def _time_plans(check: Check) -> None:
    """The first call at each of several lengths, which have cuDNN build a plan, and the second."""
    device = torch.device(check.device)
    if device.type != "cuda":
        check.not_run("milliseconds per new length with cuDNN attention", "a CPU has no cuDNN attention")
        return
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    for is_enabled in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(is_enabled)
        times = []
        for length in [40, *_PLAN_LENGTHS, *_PLAN_LENGTHS]:
            row = torch.randn(1, 32, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
            synchronize(device)
            start = time.perf_counter()
            F.scaled_dot_product_attention(row, row, row, is_causal=True).sum().backward()
            synchronize(device)
            times.append(time.perf_counter() - start)
        number = len(_PLAN_LENGTHS)
        first, again = (1000 * sum(part) / number for part in (times[1 : number + 1], times[number + 1 :]))
        name = f"cuDNN attention {'on' if is_enabled else 'off'}: milliseconds per new length"
        check.measured(name, first, note=f"{again:.3g} when the length comes again")
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _layout(device: torch.device, prefix: int) -> PaddingFree:
    generator = torch.Generator().manual_seed(1)
    lengths = tuple((torch.randint(*TOKENS, (BATCH // 2,), generator=generator) - prefix).tolist())
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return PaddingFree(empty, empty, empty, prefix, lengths)


def _repeat(tensor: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    return tensor.repeat_interleave(heads[0] // heads[1], dim=1)


def _with_gradients(attention: Attention, inputs: Tensors) -> list[torch.Tensor]:
    """The output, and the gradients of q, k and v for the upstream gradient, the last of ``inputs``."""
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def _error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is exact; infinite for NaN."""
    return float(((seen.double() - exact).norm() / exact.norm()).nan_to_num(nan=torch.inf))
