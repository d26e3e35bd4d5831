"""The rotary embedding as a complex product, and fused norms, against torchtune's modules: values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import FAMILIES
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from finch.training.model import rotate_halves, rotate_pairs, use_fast_rotary, use_fused_norm

BATCH, SEQ, HEADS, DIM = 2, 5, 3, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("kind", [RotaryPositionalEmbeddings, Llama3ScaledRoPE])
def test_rotate_pairs_equals_torchtune(kind: type, has_positions: bool, dtype: torch.dtype) -> None:
    rotary = kind(DIM, max_seq_len=64, base=500)
    positions = torch.randint(0, 64, (BATCH, SEQ)) if has_positions else None
    x = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype, requires_grad=True)
    grad = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype)
    expected, actual = rotary(x, input_pos=positions), rotate_pairs(rotary, x, input_pos=positions)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    gradients = [torch.autograd.grad(output, x, grad)[0] for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_rotate_pairs_keeps_double_precision() -> None:
    """So that an fp64 run is the same however its tokens are divided into batches."""
    rotary = RotaryPositionalEmbeddings(DIM, max_seq_len=64)
    x = torch.randn(1, 7, 1, DIM, dtype=torch.float64)
    cosine, sine = rotary.cache[None, :7, None].double().unbind(-1)
    even, odd = x[..., ::2], x[..., 1::2]
    expected = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)
    torch.testing.assert_close(rotate_pairs(rotary, x), expected, rtol=0, atol=1e-14)


def test_use_fast_rotary_keeps_logits() -> None:
    decoder = llama2(
        vocab_size=32, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=16, intermediate_dim=48
    )
    fast = copy.deepcopy(decoder)
    use_fast_rotary(fast)
    tokens = torch.randint(0, 32, (BATCH, SEQ))
    assert fast.layers[0].attn.pos_embeddings.forward.func is rotate_pairs
    torch.testing.assert_close(fast(tokens), decoder(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_positions", [False, True])
def test_rotate_halves_is_torchtunes_bit_for_bit(has_positions: bool, dtype: torch.dtype) -> None:
    tables = [Qwen2RotaryPositionalEmbeddings(DIM, max_seq_len=64, base=base) for base in (500, 1e6)]
    positions = torch.randint(0, 64, (BATCH, SEQ)) if has_positions else None  # which keep what was looked up
    for rotary in (*tables, *tables):
        x = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype, requires_grad=True)
        grad = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype)
        expected, actual = rotary(x, input_pos=positions), rotate_halves(rotary, x, input_pos=positions)
        assert torch.equal(actual, expected)
        assert torch.equal(*(torch.autograd.grad(output, x, grad)[0] for output in (actual, expected)))


def test_angles_are_looked_up_once_for_all_layers() -> None:
    decoder = FAMILIES["qwen3"].build()
    use_fast_rotary(decoder)
    tokens, positions = torch.randint(0, 32, (1, SEQ)), torch.arange(SEQ)[None]
    with torch.profiler.profile() as profile:
        decoder(tokens, input_pos=positions)
    assert len(decoder.layers) > 1
    assert [each.count for each in profile.key_averages() if each.key == "aten::index"] == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_that_keeps_16_bits_is_torchtunes_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    decoder = FAMILIES["qwen3"].build().to(dtype)
    norms = [decoder.norm, decoder.layers[0].attn.q_norm]
    inputs = [torch.randn(3, 5, norm.scale.numel(), dtype=dtype, requires_grad=True) for norm in norms]
    for norm in norms:
        torch.nn.init.normal_(norm.scale)
    before = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
    use_fused_norm(decoder)
    for norm, x, expected in zip(norms, inputs, before, strict=True):
        found = norm(x)
        gradients, others = (torch.autograd.grad(y.float().square().sum(), [x, norm.scale]) for y in (found, expected))
        assert torch.equal(found, expected)
        assert all(map(torch.equal, gradients, others))


def test_norm_of_fp64_is_not_rounded() -> None:
    decoder = FAMILIES["qwen3"].build().double()
    use_fused_norm(decoder)
    x = torch.randn(3, decoder.norm.scale.numel(), dtype=torch.float64)
    expected = decoder.norm.scale * x / (x.square().mean(-1, keepdim=True) + decoder.norm.eps).sqrt()
    torch.testing.assert_close(decoder.norm(x), expected, rtol=1e-14, atol=0)
