"""Attention in one call per layer equals the call per sample, in float64: values and gradients."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from finch.data.padding_free import LONG_PREFIX, PaddingFree, Varlen
from finch.training.padding_free_attention import padding_free_attention
from finch.training.varlen_attention import (
    _attend,
    _attention_operator,
    _differentiate,
    _gradients_operator,
    varlen_attention,
)

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
LENGTHS = (5, 19, 1, 30)


def layout_of(prefix: int, lengths: tuple[int, ...] = LENGTHS) -> PaddingFree:
    tokens = torch.arange(prefix + sum(lengths))
    return PaddingFree(tokens, tokens[None], tokens, prefix, lengths, Varlen.of(prefix, lengths))


def draw(tokens: int, heads: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(tokens, heads, HEAD_DIM, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("prefix", [0, 8, 27, LONG_PREFIX, 1024])
def test_one_call_equals_a_call_per_sample(prefix: int) -> None:
    torch.manual_seed(0)
    layout, filling = layout_of(prefix), 3
    tokens, rows = layout.num_tokens, Varlen.of(prefix, [*LENGTHS, filling])
    inputs = [draw(tokens + filling, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = draw(tokens, HEADS).detach()
    output = varlen_attention(*inputs, rows)[:tokens]
    q, k, v = (each[:tokens].transpose(0, 1)[None] for each in inputs)
    repeated = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    expected = padding_free_attention(q, *repeated, layout)[0].transpose(0, 1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    gradients, others = (torch.autograd.grad(each, inputs, upstream) for each in (output, expected))
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
        assert not gradient[tokens:].any()  # what fills the row changes nothing


@pytest.mark.parametrize(("prefix", "lengths"), [(0, (16,)), (8, (7, 9)), (16, ()), (LONG_PREFIX, (8,))])
def test_operators_keep_torchs_rules(prefix: int, lengths: tuple[int, ...]) -> None:
    """Schema, fake tensors, autograd and dynamic shapes of both."""
    rows, tokens = Varlen.of(prefix, lengths), prefix + sum(lengths)
    inputs = [draw(tokens, heads, torch.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    torch.library.opcheck(_attention_operator, (*inputs, *rows))
    detached = [each.detach() for each in inputs]
    results = _attention_operator(*detached, *rows)
    torch.library.opcheck(_gradients_operator, (torch.randn_like(detached[0]), *detached, *results, *rows))


@pytest.mark.parametrize("prefix", [0, 27, LONG_PREFIX])
def test_operations_are_counted_per_pair(prefix: int) -> None:
    """A forward is two products per query and key, a backward five."""
    tokens, rows = prefix + sum(LENGTHS), Varlen.of(prefix, LENGTHS)
    inputs = [draw(tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with FlopCounterMode(display=False) as counter:
        varlen_attention(*inputs, rows).sum().backward()
    pairs = prefix**2 + sum(length * (prefix + length) for length in LENGTHS)
    assert counter.get_total_flops() == 7 * 2 * pairs * HEADS * HEAD_DIM


def test_arguments_of_the_gpus_kernels() -> None:
    """On tensors without data, which torch checks against the kernels' schemas and shapes."""
    with FakeTensorMode():
        q, k = (torch.empty(rows, heads, 64, dtype=torch.bfloat16, device="cuda") for rows, heads in ((32, 6), (48, 2)))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        lengths = (ends, ends, 20, 30)
        output, lse = _attend(q, k, k, lengths, is_causal=True)
        assert (output.shape, lse.shape, lse.dtype) == (q.shape, (6, 32), torch.float32)
        gradients = _differentiate(output, q, k, k, output, lse, lengths, is_causal=True)
        assert [(each.shape, each.dtype) for each in gradients] == [(each.shape, each.dtype) for each in (q, k, k)]
