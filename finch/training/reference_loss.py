"""What the pretrained model says of the training set, taken in one pass: the loss of every target token.

Its mean is where FINCH's average begins (``init: dataset``), its sequences are FLOW's weights, its tokens STM's mask. The
pass is kept beside the run under a fingerprint, and is never made with tuned weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from finch import files
from finch.data.loading import Batch, Samples
from finch.data.order import EMPTY
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX, Objective
from finch.training.dataset_loss import iter_token_losses, no_targets

_SAMPLED_BYTES, _SAMPLES = 65536, 64


@dataclass(frozen=True)
class ReferenceLosses:
    """The pretrained model's losses on the training rows.

    Attributes:
        losses: [target tokens] fp32 (fp64 of an fp64 model), nats, row after row in the dataset's order.
        ends: [rows] int64, where each row's losses end.
        sequence_losses: [sequences with targets] fp32, nats, each one's mean; in packed rows there are several a row.
    """

    losses: torch.Tensor
    ends: torch.Tensor
    sequence_losses: torch.Tensor

    def row(self, index: int) -> torch.Tensor:
        """The losses of one row's target tokens; none for the empty row."""
        if index == EMPTY:
            return self.losses[:0]
        return self.losses[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @property
    def mean(self) -> float:
        """Mean loss over all target tokens in nats; the same bits on any number of ranks that compute the same losses."""
        return float(self.losses.sum(dtype=torch.float64) / self.losses.numel())

    def save(self, file: Path, fingerprint: str) -> None:
        """Writes all of it to ``file``, or nothing."""
        tensors = {"losses": self.losses, "ends": self.ends, "sequence_losses": self.sequence_losses}
        with files.atomic_file(file) as partial:
            save_file(tensors, partial, metadata={"fingerprint": fingerprint})


def load_reference_losses(file: Path, fingerprint: str) -> ReferenceLosses | None:
    """What an earlier pass left, or None: there is nothing, it is of another model or other rows, or it is damaged."""
    try:
        with safe_open(file, framework="pt") as content:
            if (content.metadata() or {}).get("fingerprint") != fingerprint:
                return None
            return ReferenceLosses(*(content.get_tensor(name) for name in ("losses", "ends", "sequence_losses")))
    except Exception:  # safetensors has no class of its own for a file cut off; the pass is then made again
        return None


def fingerprint_of(files: Iterable[Path], rows: int, settings: Mapping[str, Any]) -> str:
    """What a pass belongs to.

    Args:
        files: the pretrained weights; their sizes and 64 pieces spread over each are read, since tuning changes every
            weight and whole files would take minutes.
        rows: digest of all tokenized rows, which tokenizer, template and max_seq_len have made.
        settings: whatever else decides the losses, as JSON: the model's block, the dtype.
    """
    digest = hashlib.sha256(json.dumps([rows, settings], sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for piece in range(_SAMPLES):
                content.seek(size * piece // _SAMPLES)
                digest.update(content.read(_SAMPLED_BYTES))
    return digest.hexdigest()


class ReferenceLossCache:
    """A run's one pass: kept in a file under its fingerprint, used again where it fits.

    Args:
        file: where it is kept.
        fingerprint: see :func:`fingerprint_of`.
        model_folder: of the pretrained model, for messages.
    """

    def __init__(self, file: Path, fingerprint: str, model_folder: Path) -> None:
        self._file, self._fingerprint, self._model_folder = file, fingerprint, model_folder

    def load(self, parallel: Parallel) -> ReferenceLosses | None:
        """An earlier pass of this model over these rows, if every rank finds it."""
        found = load_reference_losses(self._file, self._fingerprint)
        if not parallel.all_true(found is not None):
            return None
        logger.info(f"the pretrained model's losses are those of {self._file}")
        return found

    def take(self, model: nn.Module, **whole: Any) -> ReferenceLosses:
        """Makes the pass and keeps it. Arguments: see :func:`compute_reference_losses`.

        Raises:
            UserError: no row has a target token, or the mean is not finite.
        """
        began = time.perf_counter()
        found = compute_reference_losses(model, **whole)
        if not math.isfinite(found.mean):
            raise UserError(
                f"the pretrained model's mean loss over the training rows is {found.mean}; check the weights in checkpointer.checkpoint_dir={self._model_folder}, and dtype"
            )
        logger.info(
            f"pretrained model's mean loss over {len(whole['samples'])} training samples: {found.mean:.4f} nats ({time.perf_counter() - began:.1f} s)"
        )
        if whole["parallel"].is_rank_zero:
            found.save(self._file, self._fingerprint)
        return found


def compute_reference_losses(
    model: nn.Module,
    samples: Samples,
    collate: Callable[[list[dict[str, Any]]], Batch],
    parallel: Parallel,
    **options: Any,
) -> ReferenceLosses:
    """The pass itself. Arguments: see :func:`finch.training.dataset_loss.iter_token_losses`.

    Raises:
        UserError: no row has a target token.
    """
    places: list[int] = []
    numbers, losses, sequences = [], [], []
    for rows, batch, token_loss in iter_token_losses(model, samples, collate, parallel, **options):
        token_loss = token_loss.cpu()
        places += rows
        numbers.append((batch["labels"] != IGNORE_INDEX).sum(1))
        losses.append(token_loss.flatten()[batch["targets"]])
        sequences.append(Objective().sequence_losses(token_loss, batch))
    mine = (torch.tensor(places), torch.cat(numbers), torch.cat(losses), torch.cat(sequences))
    found = _in_order(parallel.gather(mine), len(samples))
    if found.losses.numel() == 0:
        raise no_targets(samples)
    return found


def _in_order(shares: list[tuple[torch.Tensor, ...]], num_rows: int) -> ReferenceLosses:
    """The ranks' shares as one, by row."""
    rows: list[torch.Tensor] = [torch.empty(0)] * num_rows
    for places, numbers, losses, _ in shares:
        for place, row in zip(places.tolist(), losses.split(numbers.tolist()), strict=True):
            if place != EMPTY:
                rows[place] = row
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    return ReferenceLosses(torch.cat(rows), ends, torch.cat([share[3] for share in shares]))
