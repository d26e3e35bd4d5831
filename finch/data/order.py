"""One global order of samples, independent of the number of ranks.

Step i of an epoch takes positions [i*G, (i+1)*G) of the epoch's seeded permutation, G being the global batch, and
distributes them over ranks and micro-batches. So the same samples are in the same step on any layout with the same G, and
(epoch, samples consumed) is all that a run's position needs.

Where the samples' lengths are known they are distributed by tokens: micro-batches run without padding, so that their time depends on
their tokens, and all ranks wait for the slowest. The samples of a step are the same either way, and its gradient up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from finch.base.errors import UserError

EMPTY = -1
"""Index of a row without targets: a rank that has run out of samples uses it, so that every rank runs the same forwards."""


@dataclass(frozen=True)
class GlobalOrder:
    """The order of a dataset's samples and how they are distributed.

    Args:
        num_samples: of an epoch.
        micro_batch: samples per forward pass and rank.
        accumulation: micro-batches per optimizer step and rank.
        ranks: data-parallel ranks.
        shuffle: whether an epoch is a seeded permutation, or the dataset's own order.
        seed: of the permutation; epoch e uses seed + e, as torch's DistributedSampler does.
        drop_last: leave out an epoch's last global batch if it is short, as torchtune does. Otherwise it is kept,
            complete.
        indices: an epoch's dataset indices by its number, in place of ``shuffle`` and ``seed``: a mixture's, or a part of the rows.
            None: an epoch is every row of the dataset, once.
        lengths: [dataset rows] int, of each row in tokens; None: not known, or the same for all.
    """

    num_samples: int
    micro_batch: int
    accumulation: int = 1
    ranks: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    indices: Callable[[int], Sequence[int]] | None = None
    lengths: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, cfg: Any, num_samples: int, ranks: int, **options: Any) -> GlobalOrder:
        """A config's order."""
        sizes = {"micro_batch": cfg.batch_size, "accumulation": cfg.gradient_accumulation_steps}
        return cls(num_samples, ranks=ranks, drop_last=cfg.drop_last, **sizes, **options)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def steps_per_epoch(self) -> int:
        full_batches, rest = divmod(self.num_samples, self.global_batch)
        return full_batches + (1 if rest and not self.drop_last else 0)

    def check(self) -> None:
        """Raises UserError if an epoch has fewer samples than a step takes."""
        if self.global_batch > self.num_samples:
            raise UserError(
                f"the global batch of {self.global_batch} (batch_size {self.micro_batch} x gradient_accumulation_steps {self.accumulation} x "
                f"{self.ranks} ranks) is larger than {'the dataset' if self.indices is None else 'an epoch'} of {self.num_samples} samples; lower "
                "batch_size or gradient_accumulation_steps"
            )

    def samples_in(self, steps: int) -> int:
        """Samples that an epoch's first ``steps`` steps consume."""
        return min(steps * self.global_batch, self.num_samples)

    def permutation(self, epoch: int) -> list[int]:
        """Dataset indices of an epoch in the order in which they are consumed."""
        if self.indices is not None:
            return list(self.indices(epoch))
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def micro_batches(self, rank: int, epoch: int = 0, consumed: int = 0) -> Iterator[list[int]]:
        """Dataset indices of each micro-batch of ``rank``, from ``consumed`` samples into the epoch on.

        None has more than ``micro_batch`` samples, and the numbers of two micro-batches of a step differ by one at most where lengths
        are known. All ranks get the same number of micro-batches; one that has run out of samples gets [EMPTY].
        """
        for micro_batches in self.steps(epoch, consumed):
            yield from micro_batches[rank :: self.ranks]

    def steps(self, epoch: int = 0, consumed: int = 0) -> Iterator[list[list[int]]]:
        """The micro-batches of each step, from ``consumed`` samples into the epoch on: number n is of rank n % ranks."""
        order = self.permutation(epoch)
        end = self.steps_per_epoch * self.global_batch
        for start in range(consumed, min(end, self.num_samples), self.global_batch):
            yield self._micro_batches(order[start : start + self.global_batch], self.micro_batches_in_step(start))

    def _micro_batches(self, batch: list[int], count: int) -> list[list[int]]:
        """The ``count`` micro-batches of each rank in a step."""
        if self.lengths is None:
            # The ranks' shares of a short batch differ by one sample at most.
            shares = [batch[rank :: self.ranks] for rank in range(self.ranks)]
            starts = range(0, count * self.micro_batch, self.micro_batch)
            return [share[start:][: self.micro_batch] or [EMPTY] for start in starts for share in shares]
        length = dict(zip(batch, self.lengths[batch].tolist(), strict=True))
        # The longest first, so that the short ones even out what the long ones leave.
        batch = sorted(batch, key=lambda index: (-length[index], index))
        bins: list[list[int]] = [[] for _ in range(self.ranks * count)]
        tokens = [0] * len(bins)
        for start in range(0, len(batch), len(bins)):
            # One sample to each micro-batch, the longest to the one with the fewest tokens so far.
            lightest_first = sorted(range(len(bins)), key=tokens.__getitem__)
            for place, index in zip(lightest_first, batch[start : start + len(bins)], strict=False):
                bins[place].append(index)
                tokens[place] += length[index]
        return [each or [EMPTY] for each in bins]

    def micro_batches_in_step(self, consumed: int) -> int:
        """How many micro-batches a rank runs in the step that starts after ``consumed`` samples; fewer in a short last batch."""
        in_step = min(self.global_batch, self.num_samples - consumed)
        # Rounded up: the rank with most samples says how many forwards all of them run.
        longest = -(-in_step // self.ranks)
        return -(-longest // self.micro_batch)


def eval_micro_batches(
    rows: Sequence[int], lengths: torch.Tensor | None, *, micro_batch: int, rank: int, ranks: int
) -> list[list[int]]:
    """The micro-batches of ``rank`` in one pass over ``rows`` without a gradient.

    The longest rows come first, rows of similar length are together, and as many are in a micro-batch as have the tokens of ``micro_batch``
    rows of mean length, padding included; at least one. All ranks get the same number of micro-batches; one that has run out of
    samples gets [EMPTY]. ``lengths``: [dataset rows] int, in tokens; None: every micro-batch has ``micro_batch`` rows in their own order.
    """
    length = [1] * len(rows) if lengths is None else lengths[list(rows)].tolist()
    places = sorted(range(len(rows)), key=lambda place: -length[place])
    budget = micro_batch * sum(length) / len(rows)
    batches, start = [], 0
    while start < len(rows):
        # The first row of a group is its longest, to which the others are padded; a row above the budget runs alone.
        end = start + ranks * max(1, int(budget / max(1, length[places[start]])))
        batches.append([rows[place] for place in places[start:end][rank::ranks]] or [EMPTY])
        start = end
    return batches
