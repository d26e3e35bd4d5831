"""From a config's `dataset` to micro-batches with shifted labels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import ListConfig
from torch.utils.data import DataLoader, Dataset
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset, PackedDataset

from finch.config.instantiate import build, component_of
from finch.data.order import EMPTY, GlobalOrder
from finch.distributed.processes import init_loader_worker
from finch.errors import UserError
from finch.objectives import IGNORE_INDEX
from finch.torchtune_names import shift_labels

Batch = dict[str, Any]
# What stands in a batch for the objective alone; see finch.objectives.
FOR_THE_OBJECTIVE = ("pretrained_token_loss", "statistic", "top_logits")
_PRETRAINED = "pretrained_losses"


class Samples(Dataset):
    """A torchtune dataset whose broken rows have names, and which knows an empty row.

    Args:
        data: any map-style dataset of ``{"tokens": [...], "labels": [...]}``.
        key: the config key it came from, for messages.
        source: where its rows come from, for messages.

    Attributes:
        pretrained: from a row's number to the pretrained model's losses at its targets, [targets] in nats; set for the
            objectives that need them, which then come with the row.
    """

    def __init__(self, data: Any, key: str, source: str) -> None:
        self.data, self.key, self.source = data, key, source
        self.pretrained: Callable[[int], torch.Tensor] | None = None
        if len(data) == 0:
            raise UserError(f"{key} is empty: {source} has no rows; give another file or split")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def packed(self) -> bool:
        return is_packed(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == EMPTY:
            sample = dict(self.data[0])
            labels = sample["labels"]
            sample["labels"] = (
                torch.full_like(labels, IGNORE_INDEX)
                if isinstance(labels, torch.Tensor)
                else [IGNORE_INDEX] * len(labels)
            )
            return self._with_pretrained(sample, index)
        try:
            return self._with_pretrained(self.data[index], index)
        except Exception as error:  # whatever a row broke in a transform or a tokenizer of any library
            raise UserError(
                f"{self.key}: row {index + 1} of {self.source} cannot be used ({_reason(error)}); mend or remove that row"
            ) from error

    def _with_pretrained(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        return sample if self.pretrained is None else {**sample, _PRETRAINED: self.pretrained(index)}


def load_dataset(cfg: Any, key: str, tokenizer: Any) -> Samples:
    """Builds the dataset under a config key: one component, or a list of them, which is concatenated.

    Raises:
        UserError: the component does not exist, does not take these arguments, or has no rows.
    """
    node = cfg[key]
    nodes = list(node) if component_of(node) is None else [node]
    parts = [_load_part(part, key, tokenizer) for part in nodes]
    source = " and ".join(_source_of(part) for part in nodes)
    return Samples(parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts), key, source)


def _load_part(node: Any, key: str, tokenizer: Any) -> Any:
    source = _source_of(node)
    for file in _local_files(node):
        if not file.is_file():
            raise UserError(f"{key}.data_files={file} does not exist; correct the path")
        if file.stat().st_size == 0:
            raise UserError(f"{key} is empty: {file} has no rows; give another file")
    try:
        data = build(node, key, tokenizer)
    except UserError as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{key} is empty: {source} has no rows; give another split") from error
        _check_json_lines(node, key)
        if node.get("packed"):
            # Packing tokenizes every row: look at the same rows unpacked, where a broken one has a number.
            _check_columns(build({**node, "packed": False}, key, tokenizer), key, source)
        raise
    if len(data) == 0:
        raise UserError(f"{key} is empty: {source} has no rows; give another file or split")
    _check_columns(data, key, source)
    return data


def is_packed(data: Any) -> bool:
    return isinstance(data, PackedDataset) or bool(getattr(data, "packed", False))


def collator(
    samples: Samples, tokenizer: Any, collate: Callable[..., Batch]
) -> Callable[[list[dict[str, Any]]], Batch]:
    """Collates a micro-batch with torchtune's function and shifts its labels to stand under the token that predicts them."""
    if samples.packed:
        return functools.partial(_collate_and_shift, padded_collate_packed)
    collate = functools.partial(collate, padding_idx=tokenizer.pad_id, ignore_idx=IGNORE_INDEX)
    return functools.partial(_collate_and_shift, collate)


def loader(
    samples: Samples,
    order: GlobalOrder,
    collate: Callable[[list[dict[str, Any]]], Batch],
    *,
    rank: int,
    epoch: int = 0,
    consumed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """This rank's micro-batches of an epoch, from ``consumed`` samples on."""
    batches = list(order.micro_batches(rank, epoch, consumed))
    return iter(
        DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=num_workers,
            worker_init_fn=init_loader_worker,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(0),  # for its workers; it would draw from the training's otherwise
        )
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A copy on ``device``, queued behind what runs there; the batch itself stays where it is."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
        for name, value in batch.items()
    }


def model_inputs(batch: Batch) -> Batch:
    """A batch without what is for the objective alone."""
    return {name: value for name, value in batch.items() if name not in FOR_THE_OBJECTIVE}


def _collate_and_shift(collate: Callable[..., Batch], rows: list[dict[str, Any]]) -> Batch:
    pretrained = [row.pop(_PRETRAINED) for row in rows if _PRETRAINED in row]
    batch = collate(rows)
    batch["labels"] = shift_labels(batch["labels"])
    batch["targets"] = (batch["labels"].flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    if pretrained:
        values = torch.cat(pretrained)
        losses = values.new_zeros(batch["labels"].numel()).index_copy(0, batch["targets"], values)
        batch["pretrained_token_loss"] = losses.view_as(batch["labels"])
    return batch


def _local_files(node: Any) -> list[Path]:
    """The data files of a component that are plain paths; patterns and addresses are left to the datasets library."""
    files = node.get("data_files")
    names = [files] if isinstance(files, str) else list(files) if isinstance(files, (list, ListConfig)) else []
    return [Path(name) for name in names if not any(sign in str(name) for sign in ("*", "?", "[", "://"))]


def _source_of(node: Any) -> str:
    files, source, split = node.get("data_files"), node.get("source"), node.get("split")
    name = str(files or source or component_of(node))
    return f"{name} (split {split})" if split not in (None, "train") else name


def _check_columns(data: Any, key: str, source: str) -> None:
    """Finds the first row without a field that the message transform reads, where the rows are a table."""
    inner = data.ds if isinstance(data, PackedDataset) else data
    table: Any = getattr(inner, "_data", None)
    transform = getattr(inner, "_message_transform", None)
    columns = getattr(transform, "column_map", None) or getattr(transform, "_column_map", None)
    if not isinstance(columns, dict) or not hasattr(table, "column_names"):
        return
    for role, column in columns.items():
        if column not in table.column_names:
            raise UserError(
                f"{key}: {source} has no field {column!r}, which column_map names for {role!r}; its fields are {', '.join(table.column_names)}"
            )
        missing = next((row for row, value in enumerate(table[column]) if value is None), None)
        if missing is not None:
            raise UserError(f"{key}: row {missing + 1} of {source} has no field {column!r}; mend or remove that row")


def _check_json_lines(node: Any, key: str) -> None:
    for file in _local_files(node):
        if file.suffix != ".jsonl":
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    json.loads(line.strip() or "null")
                except ValueError as error:
                    raise UserError(
                        f"{key}: row {number} of {file} is not JSON ({error}); mend or remove that row"
                    ) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
