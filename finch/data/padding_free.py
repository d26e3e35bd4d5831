"""A micro-batch without padding: its samples one after another as one row, and the tokens that all of them begin with once.

The padded batch stays what collators, objectives and metrics see; only the decoder's layers run on the row. Tokens after a sample's
last target are left out as well: nothing depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

MIN_PREFIX = 8
"""Tokens of the shortest prefix that is shared. A shorter one, such as a BOS token, saves less than its attention costs."""
LONG_PREFIX = 1000
"""Tokens from which on a prefix is not copied to each sample's keys: the samples attend to it in a call of its own."""
MULTIPLE = 8
"""Tokens of which the row of a micro-batch is a multiple, as matrix products in 16 bits want their sizes; in one call, tokens that nothing asks for fill it."""


class Varlen(NamedTuple):
    """What attention in one call over the whole row needs, as two tensors: of a compiled graph only their sizes are asked.

    Attributes:
        tokens: int32 on the device: where each sequence's queries end, from 0; where its keys end; of each key its token in the row;
            where among the keys the row's tokens are; where the prefix's copies are. The last three only where a prefix is copied;
            two tokens' numbers each where a long one is not: 0 and the samples', 0 and the prefix's.
        sizes: [5] int64 on the host: sequences, tokens of the longest one's queries, of its keys, of the prefix, and of all keys, 0
            where they are the row's.
    """

    tokens: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, prefix: int, lengths: Sequence[int]) -> Varlen:
        """These tensors of a row on the host, ``lengths`` as :class:`PaddingFree` has them and what fills the row: the prefix is the first sequence, each
        sample's keys are the prefix's and its own."""
        if not lengths:  # all samples end in the prefix
            prefix, lengths = 0, (prefix,)
        shared = prefix if prefix < LONG_PREFIX else 0
        first, own = [prefix] if prefix else [], torch.tensor(lengths)
        lengths_q, lengths_k = [*first, *lengths], [*first, *(shared + length for length in lengths)]
        ends_q, ends_k = (F.pad(torch.tensor(each).cumsum(0), (1, 0)) for each in (lengths_q, lengths_k))
        parts, gathered = [ends_q, ends_k], 0
        if shared:
            tokens, gathered = sum(lengths_q), sum(lengths_k)
            shifts = ends_k[1:-1] + prefix - ends_q[1:-1]  # of a sample's tokens, from the row to the keys
            places = torch.arange(tokens)
            places[prefix:] += shifts.repeat_interleave(own)
            copies = (ends_k[1:-1, None] + torch.arange(prefix)).flatten()
            keys = torch.empty(gathered, dtype=torch.int64)
            keys[places] = torch.arange(tokens)
            keys[copies] = torch.arange(prefix).repeat(len(lengths))
            parts += [keys, places, copies]
        elif prefix:
            parts.append(torch.tensor([0, sum(lengths), 0, prefix]))
        sizes = [len(lengths_q), max(lengths_q), max(lengths_k), prefix, gathered]
        return cls(torch.cat(parts).to(torch.int32), torch.tensor(sizes))


@dataclass(frozen=True)
class PaddingFree:
    """How a padded micro-batch, ``tokens`` [batch, seq], becomes one row of T tokens.

    Attributes:
        indices: [T + filling] int64, the row's tokens as positions in the flattened ``tokens``, and what fills it up to ``MULTIPLE``.
        positions: [1, T + filling] int64, of each token in its sample.
        targets: [targets] int64, the position in the row of each of the batch's ``targets``.
        prefix: number of tokens that all samples begin with; they come first. 0: none are shared.
        lengths: tokens of each sample in the row, without the prefix; their sum is T - prefix.
        varlen: the same for attention in one call, in which the filling is a last sample.
    """

    indices: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    prefix: int
    lengths: tuple[int, ...]
    varlen: Varlen

    @property
    def num_tokens(self) -> int:
        """T, the row's tokens without the filling."""
        return self.prefix + sum(self.lengths)

    def to(self, *args: Any, **kwargs: Any) -> PaddingFree:
        """A copy whose tensors ``torch.Tensor.to`` has made, with its arguments."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> PaddingFree:
        """A copy in page-locked memory; torch's DataLoader calls it."""
        return self._map(torch.Tensor.pin_memory)

    # What attention derives from it: the same in every layer, on the layout's device, since a copy from the host would wait for it.

    @functools.cached_property
    def causal_mask(self) -> torch.Tensor:
        """[longest, prefix + longest] bool: which tokens of the prefix and of its sample each token of the longest sample attends to."""
        longest = max(self.lengths, default=0)
        device = self.indices.device
        return torch.ones(longest, self.prefix + longest, dtype=torch.bool, device=device).tril(self.prefix)

    @functools.cached_property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[samples, seq] positions in the row of each sample's tokens, then padding; [T] where each of them is in that, flattened."""
        device = self.indices.device
        lengths = self.lengths or (0,)
        seq = self.prefix + max(lengths)
        # Padding points at the row's first token, which is always there to be read.
        rows = torch.zeros(len(lengths), seq, dtype=torch.int64, device=device)
        rows[:, : self.prefix] = torch.arange(self.prefix, device=device)
        places, start = [torch.arange(self.prefix, device=device)], self.prefix
        for index, length in enumerate(lengths):
            rows[index, self.prefix : self.prefix + length] = torch.arange(start, start + length, device=device)
            places.append(index * seq + self.prefix + torch.arange(length, device=device))
            start += length
        return rows, torch.cat(places)

    def _map(self, function: Any) -> PaddingFree:
        tensors = {name: function(getattr(self, name)) for name in ("indices", "positions", "targets")}
        return replace(self, **tensors, varlen=self.varlen._replace(tokens=function(self.varlen.tokens)))


def remove_padding(tokens: torch.Tensor, targets: torch.Tensor) -> PaddingFree:
    """The row of ``tokens``, [batch, seq], each sample followed by its padding; ``targets``: [targets] int64, ascending positions in the
    flattened batch of the tokens that predict a target."""
    batch, seq = tokens.shape
    rows, columns = targets // seq, targets % seq
    ends = torch.zeros(batch, dtype=torch.int64).scatter_reduce_(0, rows, columns + 1, "amax")
    used = [row for row, end in enumerate(ends.tolist()) if end] or [0]  # ranks without samples run forwards as well
    # No longer than the shortest sample, whose padding could otherwise be taken for tokens that all have.
    prefix = _common_prefix(tokens[used], int(ends[used].min()))
    # A batch without any target keeps one token, since its forward runs as well.
    lengths = [max(int(ends[row]), 1) - prefix for row in used]
    starts = torch.zeros(batch, dtype=torch.int64)  # of each sample in the row, less the prefix that is not repeated
    starts[used] = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    column = torch.cat([torch.arange(prefix), *(prefix + torch.arange(length) for length in lengths)])
    row = torch.tensor(used).repeat_interleave(torch.tensor(lengths))
    row = torch.cat([torch.full((prefix,), used[0]), row])
    lengths = [length for length in lengths if length]
    # Position 0 of the batch fills the row; as a sample of its own nothing attends to it, and it has no target.
    filling = -len(row) % MULTIPLE
    return PaddingFree(
        indices=F.pad(row * seq + column, (0, filling)),
        positions=F.pad(column, (0, filling))[None],
        # Samples share the tokens of the prefix, and so the place of a target in it.
        targets=torch.where(columns < prefix, columns, starts[rows] + columns),
        prefix=prefix,
        lengths=tuple(lengths),
        varlen=Varlen.of(prefix, [*lengths, *([filling] if filling else [])]),
    )


def _common_prefix(tokens: torch.Tensor, longest: int) -> int:
    """How many of the first ``longest`` columns of ``tokens`` [rows, seq] are equal in all rows; 0 for one row, and below ``MIN_PREFIX``."""
    is_equal = (tokens[:, :longest] == tokens[0, :longest]).all(0)
    # The product is 1 up to the first column that differs, and 0 after it.
    prefix = int(is_equal.long().cumprod(0).sum())
    return prefix if len(tokens) > 1 and prefix >= MIN_PREFIX else 0


def is_right_padded(tokens: torch.Tensor, samples: Sequence[Sequence[int]]) -> bool:
    """Whether each row of ``tokens`` [batch, seq] begins with its sample: not where a collator packs, truncates or pads on the left."""
    return len(tokens) == len(samples) and all(
        len(sample) <= tokens.shape[1] and torch.equal(row[: len(sample)], torch.as_tensor(sample))
        for row, sample in zip(tokens, samples, strict=True)
    )
