"""Self-replay, whatever the training loop: which rows are replayed in a step, how answers are sampled, and prompts cut from templates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

Row = TypeVar("Row")


def step_rows(rows: Sequence[Row], step: int, *, number: int, seed: int) -> list[Row]:
    """The ``number`` rows that are replayed in the optimizer step ``step``, from 0: seeded permutations one after another."""
    return [row_at(rows, place, seed) for place in range(step * number, (step + 1) * number)]


def row_at(rows: Sequence[Row], place: int, seed: int) -> Row:
    """The row at a place of the seeded permutations."""
    permutation, index = divmod(place, len(rows))
    return rows[_permutation(len(rows), seed + permutation)[index]]


# A step may lie across the end of one permutation and the beginning of the next.
@lru_cache(maxsize=2)
def _permutation(number: int, seed: int) -> list[int]:
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()


def rows_in_step(share: float, num_task_rows: int) -> int:
    """How many rows are replayed next to those of the task."""
    return max(1, round(share * num_task_rows))


def uniform_draws(rows: int, number: int, stream: int) -> torch.Tensor:
    """[rows, number] fp64 in [0, 1), one seed per row; ``stream`` 0 or 1."""
    # A generator for each row: what a row draws does not depend on how many rows there are.
    generators = (torch.Generator().manual_seed(2 * row + stream) for row in range(rows))
    return torch.stack([torch.rand(number, generator=each, dtype=torch.float64) for each in generators])


def chooser(draws: torch.Tensor, temperature: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """From logits [rows, vocab] to tokens [rows]: the first whose cumulative probability at ``temperature`` is above its draw, [rows]; at
    temperature 0 the likeliest."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        # In fp64, with the draws scaled by the last sum: that of rounded probabilities may lie below a draw.
        sums = (logits.float() / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        # right=True: a draw of exactly 0 must not choose a first token whose probability is 0.
        return torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True).squeeze(1)

    return choose


def around_content(one: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens before and after what differs between two prompts, which are equal otherwise."""
    # The common end is sought in what the common start leaves, so that they cannot overlap.
    start = _common_start(one, other)
    return list(one[:start]), list(one[len(one) - _common_start(one[start:][::-1], other[start:][::-1]) :])


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def end_turn(tokens: Sequence[int], ends: Collection[int], after: Sequence[int]) -> list[int]:
    """A prompt from ``tokens``, whose last part the model wrote as the user's turn, and ``after``, what follows a turn; one of ``ends`` goes."""
    return [*(tokens[:-1] if tokens[-1] in ends else tokens), *after]
