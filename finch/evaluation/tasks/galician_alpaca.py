"""Galician Alpaca, the paper's language task: answers to the instructions of the test part, which `finch evaluate --judge` compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finch.base.errors import UserError
from finch.evaluation.results import Sample
from finch.evaluation.tasks.task import Record, Row, Source, average, by_document, plain_or_chat, response, table

ROWS = Source("galician_alpaca/*.jsonl", "irlab-udc/alpaca_data_galician", "train", ("instruction", "output"))
FIELDS = ("instruction", "input", "output")


def dataset(data_root: str | None = None, has_chat_template: bool = False, **_: Any) -> dict[str, Any]:
    """The rows of the test part, by the default split of ``finch.data.galician_alpaca``.

    Raises:
        UserError: rows without ``instruction`` and ``output``.
    """
    from finch.data.row_files import part_indices

    rows = [{field: row.get(field) or "" for field in FIELDS} for row in ROWS.load(data_root)]
    if broken := next((row for row in rows if not (row["instruction"] and row["output"])), None):
        raise UserError(
            f"galician_alpaca: a row of {ROWS.file} has no instruction or no output: {str(broken)[:100]}; fix or remove it"
        )
    indices = part_indices([([row["instruction"], row["input"]], [row["output"]]) for row in rows], "test")
    return {"test": table([_document(rows[index], has_chat_template) for index in indices])}


def _document(row: Row, has_chat_template: bool) -> Row:
    question = "\n".join(filter(None, [row["instruction"], row["input"]]))  # as in training
    return {"question": question, "output": row["output"], "prompt": plain_or_chat(question, has_chat_template)}


@by_document
def samples(record: Record) -> Sample:
    """Without a score: the instruction with its input, and the model's response, for `finch evaluate --judge`."""
    return {"score": None, "prompt": record["doc"]["question"], "response": response(record)}


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {"response_words": average(len(sample["response"].split()) for sample in samples)}
