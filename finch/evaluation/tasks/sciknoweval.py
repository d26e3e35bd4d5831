"""SciKnowEval's Chemistry rows of level 3, the paper's science task: the option's letter that the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finch.evaluation.results import Sample
from finch.evaluation.tasks import task
from finch.evaluation.tasks.parsers import letter_of
from finch.evaluation.tasks.task import Record, Row, Source

_FIELDS = ("question", "choices", "answerKey", "domain", "details")
ROWS = Source("sciknoweval/chemistry_l3.jsonl", "hicai-zju/SciKnowEval", "test", _FIELDS, "v2")


def dataset(
    data_root: str | None = None, has_chat_template: bool = False, part: str = "test", rows: int | None = None, **_: Any
) -> dict[str, Any]:
    """The multiple-choice rows of a part, as documents with ``prompt``, ``choices`` (letters) and ``gold``.

    All rows are split, as ``finch.data.sciknoweval`` does by default; then rows without choices are left out.

    Args:
        data_root: None: rows of the hub.
        has_chat_template: whether the prompt becomes a user's turn.
        part: ``test`` or ``validation``.
        rows: only so many, the first in the split's seeded order; None: all.
    """
    from finch.data.row_files import part_indices

    given = [row for row in ROWS.load(data_root) if row["domain"] == "Chemistry" and row["details"]["level"] == "L3"]
    indices = part_indices([(row["question"], row["choices"]) for row in given], part)
    chosen = [given[index] for index in indices if (given[index]["choices"] or {}).get("label")]
    return {"test": task.table([_document(row, has_chat_template) for row in chosen[:rows]])}


def _document(row: Row, has_chat_template: bool) -> Row:
    from finch.evaluation.datasets.sciknoweval import choices_of, prompt_of

    letters = list(choices_of(row))
    return {
        "subtask": row["details"].get("subtask"),
        "prompt": task.plain_or_chat(prompt_of(row), has_chat_template),
        "choices": letters,
        "gold": letters.index(row["answerKey"]),
    }


@task.by_document
def samples(record: Record, letters: Record) -> Sample:
    """With the response, and the log-likelihoods of the letters instead of a response."""
    document, text = record["doc"], task.response(record)
    letter = letter_of(text, "".join(document["choices"]))
    answer = document["choices"][document["gold"]]
    return {
        "score": float(letter == answer),
        "is_parsed": letter is not None,
        "acc_letters": float(letters["acc"]),
        "prompt": document["prompt"],
        "subtask": document["subtask"],
        "answer": answer,
        "letter": letter,
        "response": text,
        "letter_loglikelihoods": task.log_likelihoods(letters),
    }


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {"parse_rate": task.mean(samples, "is_parsed"), "acc_letters": task.mean(samples, "acc_letters")}
