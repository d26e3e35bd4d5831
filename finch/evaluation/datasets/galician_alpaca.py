"""Alpaca's instructions in Galician, the paper's language task: rows of instruction, input and output."""

from __future__ import annotations

from typing import Any

from torchtune.datasets import PackedDataset

from finch.data.rows import Rows, rows_dataset


def galician_alpaca_dataset(
    tokenizer: Any,
    *,
    source: str | None = None,
    name: str | None = None,
    data_files: str | list[str] | None = None,
    part: str = "train",
    validation_fraction: float = 0.05,
    test_fraction: float = 0.25,
    split_seed: int = 0,
    split: str = "train",
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> Rows | PackedDataset:
    """One part of the rows: 70% to train, 5% to validate, 25% to test, whatever the file's order. Rows with equal instruction and
    input stay together, see :func:`finch.data.row_files.part_indices`.

    The paper's own translation is not public. ``examples/translate_rows.py`` makes such rows; ``irlab-udc/alpaca_data_galician`` on the hub
    is a machine translation of the same Alpaca rows.

    Args:
        source: a hub name; ignored with ``data_files``.
        validation_fraction, test_fraction: shares of the rows, in [0, 1).
        column_map: ``{instruction, input, output}`` to other names.
        The others are those of :func:`finch.data.rows.rows_dataset`.

    Raises UserError if no rows are named, for rows without the fields, an argument out of range, an empty part, and packing without
    max_seq_len.
    """
    options = dict(locals())  # the arguments are rows_dataset's
    if data_files is not None:
        options |= {"source": None, "name": None}
    return rows_dataset(**options, format="instruction", split_by="content")
