"""Qwen3's attention: queries and keys are normalised per head before the rotary embedding."""

from __future__ import annotations

import torch
from torchtune.modules import MultiHeadAttention


class Qwen3Attention(MultiHeadAttention):
    """torchtune's attention with the two steps in Qwen3's order.

    torchtune 0.6.1 applies ``q_norm`` and ``k_norm`` after the rotary embedding. The RMS norm has a learned scale per
    dimension, so that the two do not commute. Takes the same arguments and has the same parameters.
    """

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: [batch, seq, embed] for the queries.
            y: [batch, seq, embed] for keys and values; self-attention passes ``x``.
            mask: [batch, seq, seq], True where attended, or a BlockMask; None: causal.
            input_pos: [batch, seq] position of each token in its own sample, for packed rows.

        Returns:
            [batch, seq, embed]

        Raises:
            ValueError: no ``y``, which only generation from a full cache would leave out.
        """
        if y is None:
            raise ValueError("Qwen3Attention needs y: pass x for self-attention")
        batch, seq, _ = x.shape
        # [batch, seq, heads, head_dim]; the counts are read off the projections, which tensor parallelism may have cut
        q = self.q_proj(x).view(batch, seq, -1, self.head_dim)
        k = self.k_proj(y).view(batch, y.shape[1], -1, self.head_dim)
        v = self.v_proj(y).view(batch, y.shape[1], -1, self.head_dim)
        q = self.pos_embeddings(self.q_norm(q), input_pos=input_pos).transpose(1, 2)
        k = self.pos_embeddings(self.k_norm(k), input_pos=input_pos).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None and self.is_causal,
        )
        return self.output_proj(out.transpose(1, 2).reshape(batch, seq, -1))
