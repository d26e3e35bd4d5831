"""Passes over a complete dataset without a gradient: its mean loss, and what the pretrained model says about the training rows.

The latter is computed before training and kept in the run's folder. Its loss on every target token: the mean is where FINCH's average
starts (``init: dataset``), its sequences give FLOW's weights, its tokens STM's mask. Its most likely tokens: what a cached KL penalty
compares with. Both are kept under a fingerprint, so that a resumed run never computes them with tuned weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from finch.base import files, run_files
from finch.base.errors import UserError
from finch.base.log import logger
from finch.base.progress import track
from finch.data.dataset import Samples
from finch.data.loader import REFERENCES, Batch, EvalLoader, model_inputs, to_device
from finch.data.order import EMPTY
from finch.data.training_data import TrainingData
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.models.hf_config import read_config
from finch.objectives import IGNORE_INDEX, Objective
from finch.training.readouts import Outputs, Readout, top_tokens
from finch.weights.files import open_safetensors, save_tensors
from finch.weights.huggingface import PretrainedFolder

_NUM_PIECES, _PIECE_BYTES = 64, 65536


@torch.no_grad()
def iter_outputs(
    model: nn.Module, loader: EvalLoader, readouts: Callable[[Batch], Sequence[Readout]] = lambda _: ()
) -> Iterator[tuple[list[int], Batch, Outputs]]:
    """This rank's share of a dataset in evaluation mode: row indices, their batch on the host, and what the model returns of them and of what
    ``readouts`` makes of the batch on the device."""
    parallel = loader.parallel
    is_shown = bool(loader.title) and parallel.is_rank_zero
    was_training = model.training
    model.eval()
    for rows, batch in track(loader, title=loader.title, total=len(loader), unit="batch", is_shown=is_shown):
        watchdog.heartbeat()
        moved = to_device(batch, parallel.device)
        yield rows, batch, model(model_inputs(moved), readouts(moved))
    model.train(was_training)


@torch.no_grad()
def dataset_loss(model: nn.Module, loader: EvalLoader) -> float:
    """Token-weighted mean cross-entropy in nats; every target token weighs the same. Raises UserError if no sample has a target token."""
    # [sum of losses, number of target tokens]; fp64, for a sum over millions of tokens.
    sums = torch.zeros(2, dtype=torch.float64, device=loader.parallel.device)
    for _, batch, outputs in iter_outputs(model, loader):
        sums[0] += outputs["loss"].sum(dtype=torch.float64)
        sums[1] += batch["targets"].numel()
    loss_sum, num_targets = loader.parallel.all_reduce_sum_(sums).tolist()
    if num_targets == 0:
        raise no_targets_error(loader.samples)
    return loss_sum / num_targets


def no_targets_error(samples: Samples) -> UserError:
    return UserError(
        f"{samples.key}: no sample of {samples.source} has a target token within tokenizer.max_seq_len; raise it, or check the template"
    )


class ReferenceFile:
    """A safetensors file that counts only under its fingerprint.

    It is mapped into memory: the ranks of a machine share its pages, and what is not in use need not be in memory.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self._fingerprint = path, fingerprint

    @classmethod
    def of_training_rows(
        cls, path: Path, cfg: DictConfig, base: PretrainedFolder, data: TrainingData, **settings: Any
    ) -> ReferenceFile:
        """The file of a run's training rows. ``data`` has statistics, whose digest of the rows is in the fingerprint, as are ``settings``."""
        assert data.stats is not None
        return cls(path, fingerprint_of(base.files, data.stats.digest, {**model_settings(cfg), **settings}))

    @property
    def exists(self) -> bool:
        """Whether this process can read it."""
        return self._read() is not None

    def load(self, parallel: Parallel) -> dict[str, torch.Tensor] | None:
        """The tensors, if every rank can read them; a collective. None: no file, of another model or other rows, or damaged."""
        tensors = self._read()
        return tensors if parallel.all_true(tensors is not None) else None

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A place that cannot be written is a warning: the tensors are computed again at the next start."""
        try:
            files.make_folder(self.path.parent)
            with files.atomic_file(self.path, is_shared=True) as partial:
                save_tensors(partial, tensors, {"fingerprint": self._fingerprint, "digest": _digest_of(tensors)})
        except OSError as error:
            logger.warning(f"{self.path} cannot be saved ({error.strerror or error}); the next start computes it again")

    def _read(self) -> dict[str, torch.Tensor] | None:
        try:
            content = open_safetensors(self.path)
        except UserError:
            return None  # also of one that is cut off
        metadata = content.metadata() or {}
        if metadata.get("fingerprint") != self._fingerprint:
            return None
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dict)
        # safetensors checks sizes only: a byte that has changed would be trained with.
        if metadata.get("digest") != _digest_of(tensors):
            logger.warning(f"{self.path} is not as it was written; it is computed again")
            return None
        return tensors


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_settings(cfg: DictConfig) -> dict[str, Any]:
    """What decides a model's outputs next to its weights; of a Hugging Face folder its config.json, wherever the folder is."""
    model: Any = OmegaConf.to_container(cfg.model, resolve=True)
    if "path" in model:
        model["path"] = read_config(Path(model["path"]))
    return {"model": model, "dtype": cfg.dtype}


def fingerprint_of(weight_files: Iterable[Path], rows: int, settings: Mapping[str, Any]) -> str:
    """What tensors of the pretrained model belong to.

    Of each weight file the size, 64 pieces spread over it and the first row of each tensor are read: reading complete files would take
    minutes, and tuning changes all of a tensor, but perhaps few tensors. ``rows`` is the digest of all tokenized rows, which depend on tokenizer, template and max_seq_len; ``settings`` is
    whatever else decides the tensors, as JSON: the model's block, the dtype.
    """
    digest = hashlib.sha256(json.dumps([rows, settings], sort_keys=True).encode())
    for file in weight_files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for piece in range(_NUM_PIECES):
                content.seek(size * piece // _NUM_PIECES)
                digest.update(content.read(_PIECE_BYTES))
        if file.suffix == ".safetensors":
            with open_safetensors(file) as stored:
                for name in sorted(stored.keys()):
                    row = stored.get_slice(name)[:1] if stored.get_slice(name).get_shape() else stored.get_tensor(name)
                    digest.update(row.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        """The tensors that there are, by attribute."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def row_span(ends: torch.Tensor, index: int) -> slice:
    """Where the values of a row are, which end at ``ends[index]``, [rows] int64; the row ``EMPTY`` has none."""
    if index == EMPTY:
        return slice(0, 0)
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


class ReferenceLossCache:
    """A run's reference losses: those of an earlier start, or computed before training."""

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
        """Computes them with the pretrained weights and saves them; a collective.

        Raises UserError if no row has a target token, or the mean is not finite.
        """
        start = time.perf_counter()
        title = "pretrained model's loss over the training rows"
        loader = self._data.eval_loader(self._data.samples, title, is_once=True)
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
    """One pass over the training rows that are drawn, in evaluation mode; a collective. Every rank gets all losses. A loader that leaves out
    repeated rows gives the same. Raises UserError if no row has a target token."""
    indices: list[int] = []
    num_targets: list[int] = []
    losses, sequence_losses = [], []
    draws, first = loader.samples.draws, loader.samples.first_equal()
    repeats = torch.ones_like(first) if draws is None else draws
    if loader.is_once:
        # A row that stands for its equals counts as often as all of them are drawn.
        repeats = torch.zeros_like(first).index_add_(0, first, repeats)
    for rows, batch, outputs in iter_outputs(model, loader):
        token_loss = outputs["loss"].cpu()
        indices += rows
        num_targets += (batch["labels"] != IGNORE_INDEX).sum(1).tolist()
        losses.append(token_loss.flatten()[batch["targets"]])
        counts = [1 if index == EMPTY else int(repeats[index]) for index in rows]
        if set(counts) == {1}:
            sequence_losses.append(Objective().sequence_losses(token_loss, batch))
        else:
            sequence_losses += _repeated_sequence_losses(token_loss, batch, counts)
    shares = loader.parallel.gather((torch.cat(sequence_losses), indices, num_targets, torch.cat(losses)))
    ends, [merged] = _merge([share[1:] for share in shares], first)
    reference = ReferenceLosses(merged, ends, torch.cat([share[0] for share in shares]), draws)
    if reference.sequence_losses.numel() == 0:
        raise no_targets_error(loader.samples)
    return reference


def _repeated_sequence_losses(token_loss: torch.Tensor, batch: Batch, repeats: list[int]) -> Iterator[torch.Tensor]:
    """Row by row the sequence losses, ``repeats`` times each; an empty row has none."""
    for index, count in enumerate(repeats):
        row: Batch = {key: batch[key][[index]] for key in ("labels", "input_pos") if key in batch}
        yield Objective().sequence_losses(token_loss[[index]], row).repeat(count)


def _merge(shares: Iterable[tuple[Any, ...]], first: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Where each row's values end, and the values in the order of the rows. A rank's share: rows, their target tokens, and values [targets, ...].
    ``first``: of each row, the one that has its values."""
    rows: dict[int, tuple[torch.Tensor, ...]] = {}
    for indices, num_targets, *values in shares:
        parts = zip(*(each.split(num_targets) for each in values), strict=True)
        rows |= {index: part for index, part in zip(indices, parts, strict=True) if index != EMPTY}
    sources = first.tolist()
    # Rows that no rank has, since a mixture never draws them, end where the row before does.
    ends = torch.tensor([len(rows[index][0]) if index in rows else 0 for index in sources]).cumsum(0)
    return ends, [
        torch.cat(values) for values in zip(*(rows[index] for index in sources if index in rows), strict=True)
    ]


@dataclass(frozen=True)
class ReferenceTopK:
    """Distributions over the most likely tokens and the rest as one, see :func:`finch.objectives.regularization.top_log_probs`.

    Attributes:
        log_probs: [target tokens, top_k + 1] fp32 (fp64 for an fp64 model), row after row in the dataset's order. Rows that a
            mixture never draws have none.
        tokens: [target tokens, top_k] int32.
        ends: [rows] int64, where each row's target tokens end.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``REFERENCES`` of one row; none for the empty row."""
        span = row_span(self.ends, index)
        return self.log_probs[span], self.tokens[span]

    def add_to(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, on the host, with the distributions of its target tokens, as :class:`finch.training.chunked_loss.TokenLoss` takes them.

        ``rows``: the dataset indices of its samples, in their order.
        """
        values = zip(*(self.row(index) for index in rows), strict=True)
        return {**batch, **dict(zip(REFERENCES, map(torch.cat, values), strict=True))}


def compute_reference_top_k(model: nn.Module, loader: EvalLoader, top_k: int) -> ReferenceTopK:
    """One pass over the training rows that are drawn, in evaluation mode; a collective. Every rank gets all rows."""
    indices: list[int] = []
    num_targets: list[int] = []
    log_probs, tokens = [], []
    for rows, batch, outputs in iter_outputs(model, loader, lambda _: [top_tokens(top_k)]):
        indices += rows
        num_targets += (batch["labels"] != IGNORE_INDEX).sum(1).tolist()
        log_probs.append(outputs["top_log_probs"].cpu().flatten(0, 1)[batch["targets"]])
        # int32 halves the file; no vocabulary is larger.
        tokens.append(outputs["top_tokens"].cpu().flatten(0, 1)[batch["targets"]].int())
    share = (indices, num_targets, torch.cat(log_probs), torch.cat(tokens))
    ends, merged = _merge(loader.parallel.gather(share), loader.samples.first_equal())
    return ReferenceTopK(merged[0], merged[1], ends)
