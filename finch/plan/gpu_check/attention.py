"""Phase 2: ways to compute attention, each against float64: values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from finch.data.padding_free import LONG_PREFIX, MULTIPLE, PaddingFree, Varlen
from finch.plan.gpu_check.models import BATCH, PREFIX, TOKENS, Model, medium_models
from finch.plan.gpu_check.plain_model import relative_error
from finch.plan.gpu_check.report import NOT_QUICK, Check
from finch.training.padding_free_attention import padding_free_attention
from finch.training.varlen_attention import is_supported, varlen_attention

Attention = Callable[..., torch.Tensor]

# Times the error of fp32 mathematics rounded to the dtype: kernels round the scores as well, one call per layer the outputs of a prefix and of
# what follows it before it joins them, and the gradients of k and v are summed over the query heads that share them, and over the samples that
# share a prefix, in the dtype.
_FACTORS = (3.0, 4.0, 4.0, 4.0)
_FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1e-5}
_BACKENDS = {
    "math": SDPBackend.MATH,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
_NO_KERNEL = ("No available kernel", "No viable backend")


def run(check: Check) -> None:
    dtypes = (torch.float32, torch.bfloat16) if check.quick else (torch.float32, torch.bfloat16, torch.float16)
    for model in medium_models(check.device).values():
        for dtype in dtypes:
            for prefix in (0, PREFIX) if check.quick else (0, PREFIX, LONG_PREFIX):
                _compare(check, model, dtype, prefix)


def _compare(check: Check, model: Model, dtype: torch.dtype, prefix: int) -> None:
    """All ways on the same rows."""
    device, heads = torch.device(check.device), (model.sizes["num_heads"], model.sizes["num_kv_heads"])
    layout, generator = _layout(device, prefix), torch.Generator().manual_seed(0)
    tokens = prefix + sum(layout.lengths)

    def draw(number: int) -> torch.Tensor:
        return torch.randn(1, number, tokens, model.head_dim, generator=generator).to(device, dtype)

    q, k, v, upstream = (draw(number) for number in (heads[0], heads[1], heads[1], heads[0]))
    mask = _visible(layout)

    def mathematics(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ _repeat(k, heads).mT * model.head_dim**-0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ _repeat(v, heads)

    truth = _with_gradients(mathematics, [each.double() for each in (q, k, v, upstream)])
    wide = _with_gradients(mathematics, [each.float() for each in (q, k, v, upstream)])
    limits = [
        max(factor * relative_error(each.to(dtype), exact), _FLOORS[dtype])
        for factor, each, exact in zip(_FACTORS, wide, truth, strict=True)
    ]
    ways = _ways(layout, mask, heads, model.head_dim, dtype)
    if check.quick and "flex" in ways:
        ways["flex"] = NOT_QUICK
    for title, attention in ways.items():
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
            errors = [relative_error(each, exact) for each, exact in zip(seen, truth, strict=True)]
            worst = max(range(4), key=lambda index: errors[index] / limits[index])
            check.at_most(name, errors[worst], limits[worst], note=f"worst of {('output', 'dq', 'dk', 'dv')[worst]}")


def _ways(
    layout: PaddingFree, mask: torch.Tensor, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> dict[str, Attention | str]:
    """Each takes q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim]; text: why it cannot be run."""
    is_cuda = mask.is_cuda

    def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return padding_free_attention(q, _repeat(k, heads), _repeat(v, heads), layout)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, _repeat(k, heads), _repeat(v, heads), attn_mask=mask)

    ways: dict[str, Attention | str] = {"per-sample loop": loop, "one call with a mask": dense}
    ways |= {f"loop, {title}": sdpa_kernel([kind])(loop) for title, kind in _BACKENDS.items()}
    is_there = is_supported(mask.device, dtype, head_dim)
    ways["one call per layer"] = _varlen(layout) if is_there else "fp16 and bf16 only, from compute capability 8.0"
    if dtype == torch.bfloat16 and not layout.prefix:  # packed rows; each kind of rows compiles a kernel
        ways["flex"] = _flex(mask) if is_cuda else "flex attention has no backward on a CPU"
    return ways


def _visible(layout: PaddingFree) -> torch.Tensor:
    """[T, T] bool: which tokens each token of the row attends to, from the definition."""
    device = layout.indices.device
    sample = torch.repeat_interleave(
        torch.arange(len(layout.lengths) + 1, device=device),
        torch.tensor([layout.prefix, *layout.lengths], device=device),
    )
    place = torch.arange(len(sample), device=device)
    return (place[:, None] >= place) & ((sample == 0) | (sample[:, None] == sample))


def _varlen(layout: PaddingFree) -> Attention:
    """One call for all rows, as in training: with the tokens that fill the row."""
    filling, rows = layout.indices.numel() - layout.num_tokens, layout.varlen

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.pad(each[0].transpose(0, 1), (0, 0, 0, 0, 0, filling)) for each in (q, k, v))
        return varlen_attention(q, k, v, rows)[: layout.num_tokens].transpose(0, 1)[None]

    return attention


def _flex(mask: torch.Tensor) -> Attention:
    size = len(mask)
    block_mask = create_block_mask(lambda _, __, row, column: mask[row, column], None, None, size, size, mask.device)
    return functools.partial(torch.compile(flex_attention), block_mask=block_mask, enable_gqa=True)


def _layout(device: torch.device, prefix: int) -> PaddingFree:
    generator = torch.Generator().manual_seed(1)
    # What follows a longer prefix is as long as what follows the usual one.
    lengths = tuple((torch.randint(*TOKENS, (BATCH // 2,), generator=generator) - min(prefix, PREFIX)).tolist())
    filling = -(prefix + sum(lengths)) % MULTIPLE
    tokens, varlen = torch.arange(prefix + sum(lengths) + filling), Varlen.of(prefix, [*lengths, filling])
    return PaddingFree(tokens, tokens[None], tokens, prefix, lengths, varlen).to(device)


def _repeat(tensor: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    return tensor.repeat_interleave(heads[0] // heads[1], dim=1)


def _with_gradients(attention: Attention, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of q, k and v for the upstream gradient, the last of ``inputs``."""
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]
