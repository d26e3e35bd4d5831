"""Keys and values of the tokens so far, for a layer of attention that generates."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVCache:
    """A layer's, in the place of torchtune's, which reads its position off the device in each layer for each token.

    ``max_seq_len``: capacity, in tokens per row.
    """

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len, self._position = max_seq_len, 0
        self._tensors: list[torch.Tensor] = []  # keys and values, in whatever shape and dtype the first ones come

    def update(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Appends ``k`` and ``v``, [batch, kv heads, new, head_dim]. Returns both for all tokens, [batch, kv heads, max_seq_len, head_dim], which
        are 0 where none has come yet."""
        if not self._tensors:
            self._tensors = [each.new_zeros((*each.shape[:2], self._max_seq_len, each.shape[3])) for each in (k, v)]
        end = self._position + k.shape[2]
        for kept, new in zip(self._tensors, (k, v), strict=True):
            kept[:, :, self._position : end] = new
        self._position = end
        return self._tensors

    def keep(self, rows: Sequence[int]) -> None:
        """Drops the other rows of the batch."""
        self._tensors = [each[rows] for each in self._tensors]
