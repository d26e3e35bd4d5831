"""TOFU's question-answer pairs (Maini et al., 2024), the paper's knowledge task: a seeded split into training and validation rows."""

from __future__ import annotations

from typing import Any

from torchtune.datasets import PackedDataset

from finch.data.rows import Rows, rows_dataset


def tofu_dataset(
    tokenizer: Any,
    *,
    source: str = "locuslab/TOFU",
    name: str | None = "full",
    data_files: str | None = None,
    part: str = "train",
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    split_by: str = "order",
    split: str = "train",
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> Rows | PackedDataset:
    """One part of TOFU's rows. The two parts of one seed never share a row.

    Args:
        source: a hub name, or ``json`` with ``data_files`` (JSON Lines with ``question`` and ``answer``).
        name: the hub's configuration, such as ``full``, ``forget10``, ``retain90``.
        data_files: local rows; source and name are then ignored.
        validation_fraction: share of the rows held out, in (0, 1); 0.1 in the paper.
        split_by: ``content`` or ``order``, the default since earlier runs resume with it.
        column_map: ``{input, output}`` to other names.
        The others are those of :func:`finch.data.rows.rows_dataset`.

    Raises UserError for an unknown part, a fraction out of range, or packing without max_seq_len.
    """
    options = dict(locals())  # the arguments are rows_dataset's
    if data_files is not None:
        options |= {"source": "json", "name": None}
    return rows_dataset(**options, format="question_answer")
