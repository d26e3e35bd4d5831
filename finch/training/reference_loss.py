"""The pretrained model's loss on every target token of the training set, computed in one pass before training.

Its mean is where FINCH's average starts (``init: dataset``), its sequences give FLOW's weights, its tokens STM's mask. It is cached
beside the run under a fingerprint, and is never computed with tuned weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from finch import run_files
from finch.data.loader import Batch, EvalLoader
from finch.data.order import EMPTY
from finch.data.training_data import TrainingData
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX, Objective
from finch.training.dataset_loss import iter_token_losses, no_targets_error
from finch.training.reference_file import ReferenceFile
from finch.weights.huggingface import PretrainedFolder


@dataclass(frozen=True)
class ReferenceLosses:
    """The pretrained model's losses on the training rows.

    Attributes:
        losses: [target tokens] fp32 (fp64 for an fp64 model), nats, row after row in the dataset's order. Rows that a mixture
            never draws have none.
        ends: [rows] int64, where each row's losses end.
        sequence_losses: [sequences with targets] fp32, nats, each one's mean, in no fixed order; packed rows hold several sequences.
            In a mixture each as often as the first epoch draws it.
        draws: [rows] int64, how often a mixture's first epoch draws each row; None: there is no mixture.
    """

    losses: torch.Tensor
    ends: torch.Tensor
    sequence_losses: torch.Tensor
    draws: torch.Tensor | None = None

    def row(self, index: int) -> torch.Tensor:
        """[targets] the losses of one row; none for the empty row."""
        return self.losses[row_span(self.ends, index)]

    @property
    def mean(self) -> float:
        """Mean over the target tokens of an epoch in nats; the same bits on any number of ranks that compute the same losses.

        In a mixture it is the first epoch's, so that each row counts as often as it is drawn.
        """
        if self.draws is None:
            return float(self.losses.sum(dtype=torch.float64) / self.losses.numel())
        weights = self.draws.repeat_interleave(self.ends.diff(prepend=self.ends.new_zeros(1)))
        return float((self.losses.double() * weights).sum() / weights.sum())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is, by attribute."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def row_span(ends: torch.Tensor, index: int) -> slice:
    """Where the values of one row stand.

    Args:
        ends: [rows] int64, where the values of each row end.
        index: of the row; ``EMPTY`` has no values.
    """
    if index == EMPTY:
        return slice(0, 0)
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


class ReferenceLossCache:
    """A run's reference losses: those of an earlier start, or computed before training.

    Args:
        cfg: a recipe's config.
        base: the pretrained model.
        data: with statistics of the training rows.
        run: the run's folder.
    """

    def __init__(self, cfg: DictConfig, base: PretrainedFolder, data: TrainingData, run: Path) -> None:
        self._file = ReferenceFile.of_training_rows(run / run_files.REFERENCE_LOSSES, cfg, base, data)
        self._data, self._model_folder = data, base.folder

    def load(self, parallel: Parallel) -> ReferenceLosses | None:
        """The losses of an earlier start, if every rank can read them; a collective."""
        tensors = self._file.load(parallel)
        if tensors is None:
            return None
        logger.info(f"the pretrained model's losses are read from {self._file.path}")
        return ReferenceLosses(**tensors)

    def compute(self, model: nn.Module) -> ReferenceLosses:
        """Computes and saves them; a collective.

        Args:
            model: with the pretrained weights.

        Raises:
            UserError: no row has a target token, or the mean is not finite.
        """
        start = time.perf_counter()
        loader = self._data.eval_loader(self._data.samples, "pretrained model's loss over the training rows")
        reference = compute_reference_losses(model, loader)
        if not math.isfinite(reference.mean):
            raise UserError(
                f"the pretrained model's mean loss over the training rows is {reference.mean}; check the weights in "
                f"checkpointer.checkpoint_dir={self._model_folder}, and dtype"
            )
        logger.info(
            f"pretrained model's mean loss over {len(loader.samples.rows)} training samples: {reference.mean:.4f} nats "
            f"({time.perf_counter() - start:.1f} s)"
        )
        if loader.parallel.is_rank_zero:
            self._file.save(reference.tensors())
        return reference


def compute_reference_losses(model: nn.Module, loader: EvalLoader) -> ReferenceLosses:
    """One pass over the training rows that are drawn, in evaluation mode; a collective. Every rank gets all losses.

    Raises:
        UserError: no row has a target token.
    """
    indices: list[int] = []
    num_targets, losses, sequence_losses = [], [], []
    draws = loader.samples.draws
    for rows, batch, token_loss in iter_token_losses(model, loader):
        token_loss = token_loss.cpu()
        indices += rows
        num_targets.append((batch["labels"] != IGNORE_INDEX).sum(1))
        losses.append(token_loss.flatten()[batch["targets"]])
        if draws is None:
            sequence_losses.append(Objective().sequence_losses(token_loss, batch))
        else:
            sequence_losses += _repeated_sequence_losses(token_loss, batch, draws[torch.tensor(rows)].tolist())
    share = (torch.tensor(indices), torch.cat(num_targets), torch.cat(losses), torch.cat(sequence_losses))
    reference = replace(_merge(loader.parallel.gather(share), len(loader.samples)), draws=draws)
    if reference.sequence_losses.numel() == 0:
        raise no_targets_error(loader.samples)
    return reference


def _repeated_sequence_losses(token_loss: torch.Tensor, batch: Batch, repeats: list[int]) -> Iterator[torch.Tensor]:
    """Row by row the sequence losses, ``repeats`` times each; an empty row has none."""
    for index, count in enumerate(repeats):
        row: Batch = {key: batch[key][[index]] for key in ("labels", "input_pos") if key in batch}
        yield Objective().sequence_losses(token_loss[[index]], row).repeat(count)


def _merge(shares: list[tuple[torch.Tensor, ...]], num_rows: int) -> ReferenceLosses:
    """The ranks' shares in the order of the rows."""
    rows: list[torch.Tensor] = [torch.empty(0)] * num_rows
    for indices, num_targets, losses, _ in shares:
        for index, row in zip(indices.tolist(), losses.split(num_targets.tolist()), strict=True):
            if index != EMPTY:
                rows[index] = row
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    return ReferenceLosses(torch.cat(rows), ends, torch.cat([share[3] for share in shares]))
