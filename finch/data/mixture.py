"""Mixtures: in which order the rows of several datasets are drawn in proportion to their weights.

The first dataset sets the length of an epoch: each of its rows is drawn once. Of each other dataset an epoch draws as many
rows as its weight says, without repetition until all have been drawn, then in a new order; the next epoch continues where
this one ends. All of it follows from the seed and the epoch's number, so a run has no state to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from finch.base.errors import UserError
from finch.config.validation import dataset_weights
from finch.data.dataset import Samples

_MAX_SAMPLES = 10**9


@dataclass(frozen=True)
class Mixture:
    """The samples of each epoch, as indices into the concatenated datasets.

    Args:
        rows: of each dataset.
        draws: samples of each dataset in an epoch.
        shuffle: whether the rows of a dataset, and the datasets among each other, are in a seeded random order; otherwise
            rows come in their own order, and each dataset's draws are spread evenly over the epoch.
        seed: of the random orders.
    """

    rows: tuple[int, ...]
    draws: tuple[int, ...]
    shuffle: bool = True
    seed: int = 0

    @classmethod
    def from_weights(
        cls, rows: Sequence[int], weights: Sequence[float], *, shuffle: bool = True, seed: int = 0
    ) -> Mixture:
        """The mixture whose epoch draws each row of the first dataset once, and the others in proportion to their weights. Raises UserError
        if a dataset is never drawn, or an epoch is too long."""
        parts = [rows[0] * weight / weights[0] for weight in weights]
        if sum(parts) > _MAX_SAMPLES:
            raise UserError(
                f"dataset[0].weight={weights[0]:g}: an epoch would have {sum(parts):.3g} samples, since it draws each of the {rows[0]} rows of the "
                "first entry once; raise this weight, or put another entry first"
            )
        # Halves are rounded up; ``round`` would take them to the even number, so that half a row became none.
        draws = [math.floor(part + 0.5) for part in parts]
        if 0 in draws:
            index = draws.index(0)
            raise UserError(
                f"dataset[{index}].weight={weights[index]:g}: an epoch of {sum(draws)} samples would draw none of its rows; raise the weight to "
                f"{weights[0] / rows[0]:.2g} or more"
            )
        return cls(tuple(rows), tuple(draws), shuffle, seed)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return sum(self.draws)

    def indices(self, epoch: int) -> list[int]:
        """[num_samples] indices into the concatenated datasets, in the order in which the epoch consumes them."""
        dataset_of_sample = self._dataset_of_sample(epoch)
        indices = torch.empty(self.num_samples, dtype=torch.int64)
        for dataset, draws in enumerate(self.draws):
            offset = sum(self.rows[:dataset])
            indices[dataset_of_sample == dataset] = offset + self._draw(dataset, epoch * draws, draws)
        return indices.tolist()

    def draws_per_row(self) -> torch.Tensor:
        """[rows of all datasets] int64, how often the first epoch draws each row."""
        return torch.bincount(torch.tensor(self.indices(0)), minlength=sum(self.rows))

    def unique_rows_drawn(self, epochs: int) -> list[int]:
        """The indices that ``epochs`` epochs draw, each once, ascending."""
        parts = []
        for dataset, (rows, draws) in enumerate(zip(self.rows, self.draws, strict=True)):
            drawn = self._draw(dataset, 0, min(rows, epochs * draws))  # the first pass repeats no row
            parts.append(sum(self.rows[:dataset]) + drawn.sort().values)
        return torch.cat(parts).tolist()

    def describe(self, sources: Sequence[str]) -> str:
        """One line: each dataset's rows, its share of an epoch, its draws, and how often an epoch draws each row."""
        parts = [
            f"{draws:,} ({draws / self.num_samples:.2%}) from the {rows:,} rows of {source}, each {draws / rows:.3g} times"
            for rows, draws, source in zip(self.rows, self.draws, sources, strict=True)
        ]
        return f"an epoch draws {self.num_samples:,} samples: {'; '.join(parts)}"

    def _dataset_of_sample(self, epoch: int) -> torch.Tensor:
        """[num_samples] which dataset each sample of an epoch comes from."""
        datasets = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.draws))
        if self.shuffle:
            return datasets[torch.randperm(self.num_samples, generator=self._generator("epoch", epoch))]
        # In fp64: fp32 has too few places for an epoch of more than 2^24 samples. Ties keep the datasets' order.
        places = torch.cat([(torch.arange(draws, dtype=torch.float64) + 0.5) / draws for draws in self.draws])
        return datasets[places.argsort(stable=True)]

    def _draw(self, dataset: int, start: int, count: int) -> torch.Tensor:
        """[count] rows of a dataset: draws ``start`` to ``start + count`` of all that the run makes from it."""
        rows = self.rows[dataset]
        first_pass = start // rows
        last_pass = (start + count - 1) // rows
        passes = torch.cat([self._permutation(dataset, number) for number in range(first_pass, last_pass + 1)])
        return passes[start - first_pass * rows :][:count]

    def _permutation(self, dataset: int, number: int) -> torch.Tensor:
        """[rows] the order in which a dataset's rows are drawn for the ``number``-th time."""
        rows = self.rows[dataset]
        if not self.shuffle:
            return torch.arange(rows)
        return torch.randperm(rows, generator=self._generator("rows", dataset, number))

    def _generator(self, *purpose: str | int) -> torch.Generator:
        # Hashed, since torch's CPU generator reads 32 bits of a seed, and seeds such as seed + epoch would be shared.
        digest = hashlib.blake2b(repr((self.seed, *purpose)).encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def mix(cfg: DictConfig, samples: Samples, seed: int) -> Mixture | None:
    """The mixture that the weights of a recipe's config define; None without weights. Errors as for :meth:`Mixture.from_weights`.

    ``samples``, the concatenated ``dataset``, gets the rows that the run draws, and how often.
    """
    weights = dataset_weights(cfg.dataset)
    if weights is None:
        return None
    mixture = Mixture.from_weights([len(data) for data, _ in samples.parts], weights, shuffle=cfg.shuffle, seed=seed)
    samples.rows, samples.draws = mixture.unique_rows_drawn(cfg.epochs), mixture.draws_per_row()
    return mixture
