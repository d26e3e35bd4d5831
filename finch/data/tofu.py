"""TOFU's question-answer pairs (Maini et al., 2024), the paper's knowledge task: a seeded split into training and validation rows."""

from __future__ import annotations

from typing import Any

import datasets
from torch.utils.data import Dataset
from torchtune.data import InputOutputToMessages
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform

from finch.errors import UserError

PARTS = ("train", "validation")


class QuestionAnswers(Dataset[Any]):
    """Rows of a table as single-turn conversations, tokenized on access.

    Args:
        rows: a table with the columns that ``transform`` reads.
        tokenizer: a torchtune model tokenizer.
        transform: from a row to torchtune messages.
    """

    def __init__(self, rows: datasets.Dataset, tokenizer: Any, transform: InputOutputToMessages) -> None:
        self._data, self._message_transform = rows, transform
        self._prepare = SFTTransform(message_transform=transform, model_transform=tokenizer)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._prepare(self._data[index])


def tofu_dataset(
    tokenizer: Any,
    *,
    source: str = "locuslab/TOFU",
    name: str | None = "full",
    data_files: str | None = None,
    part: str = "train",
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    split: str = "train",
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> QuestionAnswers | PackedDataset:
    """One part of TOFU. The two parts of one seed never share a row.

    Args:
        tokenizer: a torchtune model tokenizer.
        source: a hub name, or ``json`` with ``data_files`` (JSON Lines with ``question`` and ``answer``).
        name: the hub's configuration, such as ``full``, ``forget10``, ``retain90``.
        data_files: local rows; source and name are then ignored.
        part: ``train`` or ``validation``.
        validation_fraction: share of the rows held out, in (0, 1); 0.1 in the paper.
        split_seed: of the permutation that chooses them.
        split: the hub's or file's split, torchtune's ``train[:400]`` form included.
        column_map: ``{input, output}`` to other names.
        train_on_input: whether the question is a target too.
        new_system_prompt: a system turn before each row.
        packed: whether rows are packed to ``tokenizer.max_seq_len``.

    Raises:
        UserError: an unknown part, a fraction out of range, or packing without max_seq_len.
    """
    if part not in PARTS:
        raise UserError(f"dataset.part={part} must be train or validation")
    if not 0 < validation_fraction < 1:
        raise UserError(
            f"dataset.validation_fraction={validation_fraction} must lie in (0, 1); the paper holds out 0.1"
        )
    if source == "json" and data_files is None:
        raise UserError("dataset.source=json needs data_files, the JSON Lines to read; set it")
    if data_files is not None:
        rows = datasets.load_dataset("json", data_files=data_files, split=split)
    else:
        rows = datasets.load_dataset(source, name, split=split)
    held_out = max(1, round(validation_fraction * len(rows)))
    if held_out >= len(rows):
        raise UserError(
            f"dataset: {len(rows)} rows are too few to hold out {validation_fraction:g} of them; give more rows"
        )
    parts = rows.train_test_split(test_size=held_out, seed=split_seed)
    transform = InputOutputToMessages(
        train_on_input=train_on_input,
        column_map=column_map or {"input": "question", "output": "answer"},
        new_system_prompt=new_system_prompt,
    )
    data = QuestionAnswers(parts["train" if part == "train" else "test"], tokenizer, transform)
    if not packed:
        return data
    if tokenizer.max_seq_len is None:
        raise UserError("dataset.packed=True needs tokenizer.max_seq_len, the length of a pack; set it")
    return PackedDataset(data, max_seq_len=tokenizer.max_seq_len)
