"""The rotary embedding of neighbouring dimensions as one complex product.

torchtune computes real and imaginary parts in eight products of tensors with stride 2, and as many again in the backward.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

_ROTATES_PAIRS = (RotaryPositionalEmbeddings.forward, Llama3ScaledRoPE.forward)  # the others rotate halves


def use_complex_product(decoder: TransformerDecoder) -> None:
    """Lets torchtune's rotary embeddings of neighbouring dimensions call :func:`rotate_pairs`; others stay as they are."""
    for module in decoder.modules():
        if type(module).forward in _ROTATES_PAIRS:
            module.forward = functools.partial(rotate_pairs, module)


def rotate_pairs(rotary: nn.Module, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
    """What ``rotary(x, input_pos=input_pos)`` returns, computed in fp32 as there, but in fp64 for an fp64 model.

    The product's last bit depends on where in the tensor an element lies: vectors and what is left over round differently.

    ``rotary.cache`` holds cosine and sine, [positions, head_dim / 2, 2]; ``x`` and the result are [batch, seq, heads, head_dim];
    ``input_pos``: [batch, seq] position of each token in its own sample; None: 0 to seq - 1.
    """
    cache: torch.Tensor = rotary.get_buffer("cache")
    used = cache[None, : x.shape[1]] if input_pos is None else cache[input_pos]
    rotations = torch.view_as_complex(used.float()).unsqueeze(2)  # [batch, seq, 1, head_dim / 2]
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)
