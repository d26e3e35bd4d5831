"""Rows of multiple-choice questions: their fields, and the texts whose likelihoods are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finch.errors import UserError

CONTINUED, QUESTIONS = ("ctx", "prompt"), ("question",)
CHOICES, ANSWERS = ("choices", "endings", "options"), ("answer", "label", "answerKey")
_FIELDS = "a question, ctx or prompt, then choices, endings or options, and answer, label or answerKey"


@dataclass(frozen=True)
class Question:
    """One row.

    Attributes:
        context: what comes before a choice.
        choices: the texts that are compared.
        answer: index of the right one.
        is_dialogue: whether the context is a user turn and each choice an assistant turn; otherwise a choice continues the context
            after a space.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    is_dialogue: bool


def is_multiple_choice(row: Mapping[str, Any]) -> bool:
    """Whether a row has the fields of one, whatever their values."""
    return _is_perturbed(row) or (
        _first(row, (*CONTINUED, *QUESTIONS)) is not None
        and _first(row, CHOICES) is not None
        and _first(row, ANSWERS) is not None
    )


def question_of(row: Mapping[str, Any]) -> Question:
    """A row as a question.

    TOFU's perturbed rows have their paraphrased question, the paraphrased answer, which is right, and the perturbed answers. HellaSwag's
    ``activity_label`` goes before its ``ctx``, as in lm-eval.

    Raises:
        UserError: a field is missing or of another type, or the answer is none of the choices.
    """
    if _is_perturbed(row):
        texts = _texts([row["paraphrased_answer"], *row["perturbed_answer"]], "perturbed_answer")
        return Question(_text(row["paraphrased_question"], "paraphrased_question"), texts, 0, True)
    if not is_multiple_choice(row):
        raise UserError(f"it has the fields {', '.join(row)}; a multiple-choice row has {_FIELDS}")
    field = _first(row, (*CONTINUED, *QUESTIONS)) or ""
    context = _text(row[field], field)
    if field == "ctx" and isinstance(row.get("activity_label"), str):
        context = f"{row['activity_label']}: {context}"
    choices_field, answer_field = _first(row, CHOICES) or "", _first(row, ANSWERS) or ""
    choices: Any = row[choices_field]
    labels: Any = None
    if isinstance(choices, Mapping):  # {text: [...], label: [...]}, as in ARC
        choices, labels = choices.get("text"), choices.get("label")
    texts = _texts(choices, choices_field)
    return Question(context, texts, _index(row[answer_field], answer_field, texts, labels), field in QUESTIONS)


def _is_perturbed(row: Mapping[str, Any]) -> bool:
    return all(row.get(field) for field in ("paraphrased_question", "paraphrased_answer", "perturbed_answer"))


def _first(row: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    return next((field for field in fields if row.get(field) is not None), None)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"its field {field!r} is not text")
    return value.strip()


def _texts(values: Any, field: str) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) < 2:
        raise UserError(f"its field {field!r} is not a list of at least two texts")
    return tuple(_text(value, field) for value in values)


def _index(answer: Any, field: str, choices: Sequence[str], labels: Any) -> int:
    """The right choice's index from its index, its label (letters where the row has none) or its text."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    text = str(answer).strip()
    for names in (labels or [], choices, [chr(ord("A") + index) for index in range(len(choices))]):
        if text in names:
            return list(names).index(text)
    if text.isdecimal() and int(text) < len(choices):
        return int(text)
    raise UserError(f"its field {field!r} is {text[:40]!r}, which names none of the {len(choices)} choices")
