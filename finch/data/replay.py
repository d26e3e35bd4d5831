"""Self-replay's rows in a run's micro-batches: which of them each step has, dealt to ranks and micro-batches by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from finch.data.dataset import Samples
from finch.data.order import EMPTY, GlobalOrder
from finch.data.prompts import Sample, num_targets
from finch.objectives.replay import row_at, rows_in_step


@dataclass(frozen=True)
class Replay:
    """The pretrained model's own answers as rows, and how many of them a step has.

    Args:
        samples: rows with the pretrained model's distributions at their targets.
        share: replayed rows per task row; a step has at least one.
        seed: of their order: one permutation after another.
    """

    samples: Sequence[Sample]
    share: float
    seed: int

    def deal(
        self, order: GlobalOrder, steps_per_epoch: int, rank: int, epoch: int, consumed: int
    ) -> Iterator[tuple[list[int], list[int], int]]:
        """For each micro-batch of ``rank`` its task rows, its replayed rows, and the replayed tokens of its step, over all ranks.

        The rows of a step depend on the seed and the step's position only: they are the same on any number of ranks and after a resume.
        """
        # Replayed rows are one sequence over the run, whose place at a step follows from the step: nothing is saved.
        full = rows_in_step(self.share, order.global_batch)
        last = order.samples_in(steps_per_epoch) - (steps_per_epoch - 1) * order.global_batch
        start = (
            epoch * ((steps_per_epoch - 1) * full + rows_in_step(self.share, last))
            + consumed // order.global_batch * full
        )
        for micro_batches in order.steps(epoch, consumed):
            rows = [index for indices in micro_batches for index in indices if index != EMPTY]
            number = rows_in_step(self.share, len(rows))
            chosen = [row_at(range(len(self.samples)), place, self.seed) for place in range(start, start + number)]
            loads = [0] * len(micro_batches)
            if order.lengths is not None:
                lengths = order.lengths
                loads = [sum(int(lengths[index]) for index in each if index != EMPTY) for each in micro_batches]
            dealt = _deal(chosen, [len(self.samples[row]["tokens"]) for row in chosen], loads)
            tokens = sum(num_targets(self.samples[row]) for row in chosen)
            pairs = zip(micro_batches[rank :: order.ranks], dealt[rank :: order.ranks], strict=True)
            yield from ((task, replayed, tokens) for task, replayed in pairs)
            start += number


def _deal(rows: Sequence[int], lengths: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Deals rows, the longest first, each to the micro-batch with the fewest tokens so far; ``loads``: tokens of each."""
    bins: list[list[int]] = [[] for _ in loads]
    for length, row in sorted(zip(lengths, rows, strict=True), key=lambda each: (-each[0], each[1])):
        lightest = min(range(len(loads)), key=loads.__getitem__)
        bins[lightest].append(row)
        loads[lightest] += length
    return bins


class WithReplay(Dataset[Any]):
    """Training rows, and after them, by their index, the replayed ones."""

    def __init__(self, samples: Samples, replayed: Sequence[Sample]) -> None:
        self._samples, self._replayed = samples, replayed

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = len(self._samples)
        # A copy, since collation takes keys out of the row.
        return self._samples[index] if index < number else dict(self._replayed[index - number])
