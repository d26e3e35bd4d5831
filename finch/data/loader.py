"""From rows to batches: collation with shifted labels, a rank's micro-batches of an epoch, and one pass over a complete dataset."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchtune.data import padded_collate_packed

from finch.data.dataset import REFERENCE_LOSSES, Samples
from finch.data.order import eval_micro_batches
from finch.data.padding_free import PaddingFree, is_right_padded, remove_padding
from finch.distributed.parallel import Parallel
from finch.distributed.processes import init_loader_worker
from finch.objectives import IGNORE_INDEX

EVAL_FACTOR = 2
"""Tokens of a forward pass without a gradient, over those of a training micro-batch. Only one layer's activations are live in it, while a
backward needs at least the inputs of all layers, and one layer's activations with their gradients. More gained nothing on a CPU."""

Batch = dict[str, Any]
Collate = Callable[[list[dict[str, Any]]], Batch]
MODEL_INPUTS = ("tokens", "labels", "targets", "layout", "mask", "input_pos", "replay_targets")
"""Keys of a batch that the model reads; the others are of the loss, and FSDP2 would move them to the device once more."""
REFERENCES = ("reference_log_probs", "reference_tokens")
"""Keys of a sample: the pretrained model's distributions at its targets, see :func:`finch.objectives.regularization.top_log_probs`."""
REPLAY = ("replay_log_probs", "replay_tokens")
"""Keys of a batch: those of its replayed rows, one after another."""


def collator(samples: Samples, tokenizer: Any, collate: Callable[..., Batch]) -> Collate:
    """Collates a micro-batch with torchtune's function and shifts its labels to the token that predicts them.

    The batch gains ``targets``, [number of targets] int64: positions in the flattened labels that are not ignored.
    """
    if samples.packed:
        return functools.partial(_collate_and_shift, padded_collate_packed)
    collate = functools.partial(collate, padding_idx=tokenizer.pad_id, ignore_idx=IGNORE_INDEX)
    return functools.partial(_collate_and_shift, collate)


def load_batches(
    samples: Dataset[Any], batches: list[list[int]], collate: Collate, *, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[Batch]:
    """The micro-batches of row indices, on the host."""
    if num_workers:
        # A forked worker that collects what is garbage here, such as a process group, waits for threads that only this process has.
        gc.collect()
    return iter(
        DataLoader(
            samples,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=num_workers,
            worker_init_fn=init_loader_worker,
            pin_memory=pin_memory,
            # For worker seeds; by default they are drawn from the training's generator.
            generator=torch.Generator().manual_seed(0),
        )
    )


@dataclass(frozen=True)
class EvalLoader:
    """One pass over ``samples.rows`` without a gradient, divided over the ranks: each once, nothing dropped, no random number drawn. With
    ``is_once`` rows that repeat an earlier one are left out.

    Rows of similar length are together where ``samples.lengths`` are known, and more rows than the ``batch_size`` of training, since no
    activations are kept for a backward. Ranks that run out of samples continue with empty rows, since FSDP2's forward is a collective.

    ``title``: of the progress bar; empty: no bar.
    """

    samples: Samples
    collate: Collate
    parallel: Parallel
    batch_size: int
    num_workers: int = 0
    title: str = ""
    is_once: bool = False

    @functools.cached_property
    def micro_batches(self) -> list[list[int]]:
        """Row indices of each of this rank's forward passes."""
        samples, parallel = self.samples, self.parallel
        return eval_micro_batches(
            self._rows(),
            samples.lengths,
            micro_batch=EVAL_FACTOR * self.batch_size,
            rank=parallel.data_parallel_rank,
            ranks=parallel.data_parallel_size,
        )

    def _rows(self) -> Sequence[int]:
        if not self.is_once:
            return self.samples.rows
        first = self.samples.first_equal().tolist()
        return [row for row in self.samples.rows if first[row] == row]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[tuple[list[int], Batch]]:
        """Row indices and their batch on the host, batch by batch."""
        batches = load_batches(self.samples, self.micro_batches, self.collate, num_workers=self.num_workers)
        return zip(self.micro_batches, batches, strict=True)


@dataclass(frozen=True)
class EvalSettings:
    """How rows that are no dataset are evaluated: ``collator`` as :func:`collator`, ``batch_size`` per forward pass and rank in training."""

    parallel: Parallel
    collator: Callable[[Samples], Collate]
    batch_size: int

    def loader(self, key: str, samples: Sequence[dict[str, Any]]) -> EvalLoader:
        data = Samples(samples, key, key)
        data.lengths = torch.tensor([len(sample["tokens"]) for sample in samples], dtype=torch.int32)
        collate = _with_references(self.collator(data))
        return EvalLoader(data, collate, self.parallel, self.batch_size)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A copy on ``device``, queued behind what runs there."""
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, (torch.Tensor, PaddingFree))
        else value.to(device)
        for name, value in batch.items()  # a packed batch's BlockMask takes no option
    }


def model_inputs(batch: Batch) -> Batch:
    return {name: batch[name] for name in MODEL_INPUTS if name in batch}


def _collate_and_shift(collate: Callable[..., Batch], rows: list[dict[str, Any]]) -> Batch:
    """The batch of task rows and, after them, replayed ones: these are in its tokens, layout and ``replay_`` keys only."""
    reference_losses = [row.pop(REFERENCE_LOSSES) for row in rows if REFERENCE_LOSSES in row]
    replayed = [{key: row.pop(key) for key in REFERENCES} for row in rows if REFERENCES[0] in row]
    batch = collate(rows)
    # Each label to the token that predicts it; the last one has none.
    batch["labels"] = F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORE_INDEX)
    batch["targets"] = (batch["labels"].flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    # Packed batches have masks and positions, and another collator may pad on the left: these run as they are.
    if batch.keys() == {"tokens", "labels", "targets"} and is_right_padded(
        batch["tokens"], [row["tokens"] for row in rows]
    ):
        batch["layout"] = remove_padding(batch["tokens"], batch["targets"])
    if replayed:
        # Replayed rows come last: their positions in the flattened batch begin where those of the task end.
        batch["labels"], targets = batch["labels"][: -len(replayed)], batch["targets"]
        is_task = targets < batch["labels"].numel()
        batch["targets"], batch["replay_targets"] = targets[is_task], targets[~is_task]
        for name, key in zip(REPLAY, REFERENCES, strict=True):
            batch[name] = torch.cat([row[key] for row in replayed])
    if reference_losses:
        # Rows follow each other in the flattened batch, so that their losses in turn are in the order of the targets.
        values = torch.cat(reference_losses)
        losses = values.new_zeros(batch["labels"].numel()).index_copy(0, batch["targets"], values)
        batch["pretrained_token_loss"] = losses.view_as(batch["labels"])
    return batch


def _with_references(collate: Collate) -> Collate:
    """Adds the pretrained model's distributions, [targets of the batch, ...] in the order of the targets, where samples have them."""

    def collated(rows: list[dict[str, Any]]) -> Batch:
        if REFERENCES[0] not in rows[0]:
            return collate(rows)
        # An empty row is a copy of another one without its targets.
        parts = {
            key: [row[key] if any(label != IGNORE_INDEX for label in row["labels"]) else row[key][:0] for row in rows]
            for key in REFERENCES
        }
        batch = collate([{key: value for key, value in row.items() if key not in REFERENCES} for row in rows])
        return {**batch, **{key: torch.cat(values) for key, values in parts.items()}}

    return collated
