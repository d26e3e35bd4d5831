"""Attention over a row of samples in one call per layer: torch's FlashAttention for sequences of unequal length, plain torch on a CPU.

It calls what ``torch.nn.attention.varlen.varlen_attn`` calls, by its name in ATen: its arguments are the same in all versions of torch that
have it, and it takes the log-sum-exp of all keys for the backward over some of them, which a long prefix needs. For torch.compile, and for
fake tensors, forward and backward are two operators that nothing looks into: the graph around them depends on no length. In eager mode they
are plain functions, since an operator in Python takes the host a third longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from finch.data.padding_free import Varlen

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


def is_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes it: on a GPU fp16 and bf16 from compute capability 8.0; on a CPU plain torch stands in for it.

    Without a GPU the answer is that for the GPUs of another machine.
    """
    if device.type != "cuda":
        return True
    fits = dtype in _DTYPES and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM
    if not fits or not torch.cuda.is_available():  # as on a login node, whose torch may be built for CUDA
        return fits
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Varlen) -> torch.Tensor:
    """[T, heads, head_dim] from ``q`` of that shape and ``k``, ``v`` [T, kv_heads, head_dim], which are not repeated per query head."""
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return _attention_operator(q, k, v, *rows)[0]
    return _Attention.apply(q, k, v, *rows)


_Lengths = tuple[torch.Tensor, torch.Tensor, int, int]
"""A call's lengths: [sequences + 1] int32 where each sequence's queries end, the same for its keys, the longest of each."""


class _Calls(NamedTuple):
    """A :class:`Varlen`, taken apart."""

    causal: _Lengths
    prefix: int
    keys: torch.Tensor | None
    """[Tk] the token in the row of each key of the causal call. None: the keys are the row's."""
    own: torch.Tensor
    """[T] where among those keys each of the row's tokens is, next to its own sample's."""
    copies: torch.Tensor
    """[samples * prefix] where the prefix's copies are."""
    dense: _Lengths | None
    """The call of all samples' queries on the keys of a long prefix, which is not gathered."""


def _calls(index: torch.Tensor, sizes: torch.Tensor, tokens: int) -> _Calls:
    # `sizes` is on the host: nothing waits for the device here.
    number, longest_q, longest_k, prefix, gathered = sizes.tolist()
    is_long = prefix > 0 and not gathered
    parts = [number + 1, number + 1, gathered, tokens if gathered else 0, prefix * (number - 1) if gathered else 0]
    ends_q, ends_k, keys, own, copies, dense_q, dense_k = index.split([*parts, *([2, 2] if is_long else [0, 0])])
    return _Calls(
        causal=(ends_q, ends_k, longest_q, longest_k),
        prefix=prefix,
        keys=keys if gathered else None,
        own=own,
        copies=copies,
        dense=(dense_q, dense_k, tokens - prefix, prefix) if is_long else None,
    )


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the scores' log-sum-exp [heads, T]."""
    calls = _calls(index, sizes, len(q))
    output, lse = _attend(q, _gather(k, calls), _gather(v, calls), calls.causal, is_causal=True)
    if calls.dense is None:
        return output, lse
    start = calls.prefix
    others, others_lse = _attend(q[start:], k[:start], v[:start], calls.dense, is_causal=False)
    own_lse = lse[:, start:]
    # Two softmaxes over different keys are one of all keys, each weighted by its share of the summed exponentials.
    both = torch.logaddexp(own_lse, others_lse)
    share = (others_lse - both).exp().T[:, :, None]
    own = output[start:]
    own.copy_(own + share * (others - own))
    own_lse.copy_(both)
    return output, lse


_attention_operator = torch.library.custom_op("finch::varlen_attention", _attention, mutates_args=())


@_attention_operator.register_fake
def _(q: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=_wide(q.dtype))


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    index: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    calls, grad = _calls(index, sizes, len(q)), grad.contiguous()
    keys, values = _gather(k, calls), _gather(v, calls)
    dq, dk, dv = _differentiate(grad, q, keys, values, output, lse, calls.causal, is_causal=True)
    dk, dv = _sum_copies(dk, calls), _sum_copies(dv, calls)
    if calls.dense is not None:  # with the output and the log-sum-exp over all keys each call gives its keys' share
        start = calls.prefix
        inputs = (grad[start:], q[start:], k[:start], v[:start], output[start:], lse[:, start:].contiguous())
        shares = _differentiate(*inputs, calls.dense, is_causal=False)
        for whole, share in zip((dq[start:], dk[:start], dv[:start]), shares, strict=True):
            whole += share
    return dq, dk, dv


_gradients_operator = torch.library.custom_op("finch::varlen_attention_backward", _gradients, mutates_args=())


@_gradients_operator.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, index, sizes = inputs
    ctx.save_for_backward(q, k, v, *output, index, sizes)


def _autograd(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_gradients_operator(grad, *ctx.saved_tensors), None, None)


_attention_operator.register_autograd(_autograd, setup_context=_save)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        output = _attention(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*_gradients(grad, *ctx.saved_tensors), None, None)


@register_flop_formula(torch.ops.finch.varlen_attention, get_raw=True)
def _flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Any, sizes: Any, **_: Any) -> int:
    """Operations of two products per sequence; as torch counts them, with what a causal mask hides."""
    with _disable_current_modes():  # the lengths are real where the other tensors are fake
        calls = _calls(index, sizes, len(q))
        pairs = int((calls.causal[0].diff() * calls.causal[1].diff()).sum())
    if calls.dense is not None:
        pairs += (len(q) - calls.prefix) * calls.prefix
    return 4 * pairs * q.shape[1] * q.shape[2]


@register_flop_formula(torch.ops.finch.varlen_attention_backward, get_raw=True)
def _backward_flops(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **_: Any
) -> int:
    """Operations of five products per sequence."""
    return _flops(q, k, v, *others[-2:]) // 2 * 5


def _gather(row: torch.Tensor, calls: _Calls) -> torch.Tensor:
    return row if calls.keys is None else row.index_select(0, calls.keys)


def _sum_copies(grad: torch.Tensor, calls: _Calls) -> torch.Tensor:
    """The row's gradient from the gathered keys': a sum in a fixed order, where index_add would use atomics."""
    if calls.keys is None:
        return grad
    copies = grad.index_select(0, calls.copies).unflatten(0, (-1, calls.prefix))  # [samples, prefix, ...]
    row, start = grad.index_select(0, calls.own), calls.prefix
    # Wide, since over many samples the roundings after each addition would add up.
    row[:start] = row[:start] + copies.sum(0, dtype=_wide(grad.dtype))
    return row


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: _Lengths, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; a sequence's mask is causal from its lower right corner."""
    if q.is_cuda:
        output, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, is_causal, False)
        return output, lse
    outputs, sums = [], []
    for own_q, own_k, own_v in _sequences(lengths, q, k, v):
        scores = _scores(own_q, own_k, is_causal)
        outputs.append((scores.softmax(-1) @ _heads(own_v, q)).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(q.dtype), torch.cat(sums, 1)


def _differentiate(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    lengths: _Lengths,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, as FlashAttention's backward: from the output and the log-sum-exp."""
    if q.is_cuda:
        inputs = (grad, q, k, v, output, lse)
        state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # of dropout, which there is none of
        gradients = torch.ops.aten._flash_attention_backward(*inputs, *lengths, 0.0, is_causal, state, unused)
        return gradients[0], gradients[1], gradients[2]
    sums, parts = lse.split(lengths[0].diff().tolist(), 1), []
    for own_q, own_k, own_v, own_grad, own_output, own_lse in (
        (*tensors, each) for tensors, each in zip(_sequences(lengths, q, k, v, grad, output), sums, strict=True)
    ):
        wide_grad = _heads(own_grad, q)
        p = (_scores(own_q, own_k, is_causal) - own_lse[..., None]).exp()
        # It equals the sum over all keys of p * dp, also where this call has only some of them.
        delta = (wide_grad * _heads(own_output, q)).sum(-1, keepdim=True)
        ds = p * (wide_grad @ _heads(own_v, q).mT - delta) * q.shape[-1] ** -0.5
        grouped = (-1, q.shape[1] // k.shape[1])  # the query heads that share a key
        dk, dv = (each.unflatten(0, grouped).sum(1) for each in (ds.mT @ _heads(own_q, q), p.mT @ wide_grad))
        parts.append([each.transpose(0, 1).to(q.dtype) for each in (ds @ _heads(own_k, q), dk, dv)])
    dq, dk, dv = (torch.cat(each) for each in zip(*parts, strict=True))
    return dq, dk, dv


def _sequences(lengths: _Lengths, *tensors: torch.Tensor) -> Any:
    """Each sequence's part of ``tensors``: queries, keys, values, and what is as long as the queries."""
    q, k = (ends.diff().tolist() for ends in lengths[:2])
    sizes = (q, k, k, *([q] * (len(tensors) - 3)))
    return zip(*(each.split(own) for each, own in zip(tensors, sizes, strict=True)), strict=True)


def _scores(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """[heads, queries, keys], scaled; minus infinity where a query does not see the key."""
    scores = _heads(q, q) @ _heads(k, q).mT * q.shape[-1] ** -0.5
    if not is_causal:
        return scores
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    return scores.masked_fill(hidden, -torch.inf)


def _heads(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[heads of ``q``, tokens, head_dim] in fp32 or wider, from [tokens, heads or kv_heads, head_dim]."""
    wide = tensor.to(_wide(tensor.dtype)).transpose(0, 1)
    return wide.repeat_interleave(q.shape[1] // tensor.shape[1], dim=0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
