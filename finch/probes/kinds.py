"""The rows of a probe: read, their kind found, and tokenized with their targets, before weights are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from torchtune.data import Message
from torchtune.datasets._sft import SFTTransform

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.schema import Probe
from finch.data.formats import RowFormat, RowToMessages, detect_columns
from finch.data.prompts import Sample, check_context, context_limit, load_rows, num_targets, plain, tokenize_prompts
from finch.data.rows import TextToTokens
from finch.data.skills import skill_rows
from finch.objectives import IGNORE_INDEX

CONTINUED, QUESTIONS = ("ctx", "prompt"), ("question",)
CHOICES, ANSWERS = ("choices", "endings", "options"), ("answer", "label", "answerKey")
SKILL = "skill"
NUM_ROWS, NUM_SKILL_ROWS = 32, 96
"""Of a probe that does not say how many; of finch's own prompts eight of each skill."""
_FIELDS = "a question, ctx or prompt, then choices, endings or options, and answer, label or answerKey"


@dataclass(frozen=True)
class Question:
    """A row with choices.

    ``context`` comes before a choice, ``answer`` is the index of the right one. In a dialogue the context is a user turn and each choice an
    assistant turn; otherwise a choice continues the context after a space.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    is_dialogue: bool


@dataclass
class ProbeRows:
    """The samples of a probe.

    Attributes:
        kind: with ``auto`` resolved.
        samples: of a multiple-choice probe one for each choice of each question; of kind self one for each prompt, without targets.
        questions: of a multiple-choice probe; the samples of each follow one another.
        groups: of each question, or else of each sample, by which metrics are separate too; empty: there are none.
    """

    kind: str
    samples: list[Sample]
    questions: list[Question] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """SHA-256 of kind, tokens and labels."""
        content = [self.kind, *((sample["tokens"], sample["labels"]) for sample in self.samples)]
        content += [self.groups] if self.groups else []
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def group(self, name: str) -> tuple[list[int], ProbeRows]:
        """The indices of a group's samples, and a probe of them alone."""
        owners = [number for number, each in enumerate(self.questions) for _ in each.choices] or range(
            len(self.samples)
        )
        indices = [index for index, owner in enumerate(owners) if self.groups[owner] == name]
        questions = [each for each, group in zip(self.questions, self.groups, strict=False) if group == name]
        return indices, ProbeRows(self.kind, [self.samples[index] for index in indices], questions)


def read_rows(name: str, settings: Probe, tokenizer: Any, max_seq_len: int | None) -> ProbeRows:
    """The rows of the probe ``name``. ``max_seq_len``: the longest row that the model can take, in tokens; None: no limit.

    Raises UserError for rows that cannot be read, of another kind than the settings', longer than the model's context, or without targets.
    """
    key, files = f"probes.{name}", settings.data_files or settings.source
    limit = context_limit(max_seq_len, tokenizer)
    try:
        if files is None:
            rows = skill_rows(settings.rows or NUM_SKILL_ROWS)
        else:
            number = settings.rows or NUM_ROWS
            rows = load_rows(settings.data_files, settings.source, settings.name, settings.split, number)
        kind, groups = _kind_of(rows[0], settings), _groups(rows, settings)
        transform = None if kind == "self" else _transform(kind, rows, settings, tokenizer)
    except UserError as error:
        raise error.under(key, data_files=f"{key}.data_files") from error
    if transform is None:
        number = settings.max_new_tokens
        options: dict[str, Any] = {"format": settings.format, "column_map": settings.column_map}
        # finch's prompts have no limit here: those that are too long are left out below, where a user's are an error.
        options |= {"max_new_tokens": number, "limit": None if files is None else limit}
        prompts = tokenize_prompts(key, str(files or "finch's prompts"), rows, tokenizer, **options)
        if files is None and limit is not None:  # those of finch's prompts that fit
            shortest, remedy = f"{key}: the shortest of finch's prompts", f"lower {key}.max_new_tokens"
            check_context(shortest, min(map(len, prompts)), number, limit, remedy)
            fits = [len(prompt) <= limit - number for prompt in prompts]
            prompts, groups = list(compress(prompts, fits)), list(compress(groups, fits))
        return ProbeRows(
            kind, [{"tokens": each, "labels": [IGNORE_INDEX] * len(each)} for each in prompts], groups=groups
        )
    result = ProbeRows(kind, [], groups=groups)
    num_truncated = 0
    for number, row in enumerate(rows, start=1):
        where = f"{key}: row {number} of {files}"
        try:
            samples, question = transform(row)
        except UserError as error:
            raise UserError(f"{where} cannot be used ({error}); fix or remove that row") from error
        except Exception as error:  # a row can break any library's tokenizer
            raise UserError(f"{where} cannot be used ({type(error).__name__}: {error}); fix or remove it") from error
        length = max(len(sample["tokens"]) for sample in samples)
        # A tokenizer with max_seq_len has cut the row: at that length nobody knows whether something is missing.
        if limit is not None and (length > limit or (length == limit and kind == "multiple_choice")):
            raise UserError(
                f"{where} has {length} tokens, the context has {limit}; remove that row, or raise tokenizer.max_seq_len where the model allows it"
            )
        num_truncated += limit is not None and length >= limit
        if any(count == 0 for count in map(num_targets, samples)):
            raise UserError(f"{where} has no target token; fix or remove that row")
        result.samples += samples
        if question is not None:
            result.questions.append(question)
    if num_truncated:
        logger.warning(
            f"{key}: {num_truncated} of {len(rows)} rows reach tokenizer.max_seq_len={limit} and are truncated there"
        )
    return result


def _groups(rows: Sequence[Mapping[str, Any]], settings: Probe) -> list[str]:
    field = settings.group_by or SKILL
    if all(row.get(field) is None for row in rows):
        if settings.group_by is not None:
            raise UserError(f"dataset.group_by={field}: the rows have no such field; they have {', '.join(rows[0])}")
        return []
    return [str(row.get(field)).replace("/", "_") for row in rows]  # a part of a metric's name


def _kind_of(row: Mapping[str, Any], settings: Probe) -> str:
    if settings.kind != "auto":
        return settings.kind
    if is_multiple_choice(row):
        return "multiple_choice"
    is_text = _format_of(row, settings).format == "text"
    return "text" if is_text else "question_answer"


def _format_of(row: Mapping[str, Any], settings: Probe) -> RowFormat:
    # A table gives each row the fields that only other rows have, as None.
    present = {name: value for name, value in row.items() if value is not None}
    return detect_columns(present, present, settings.format, settings.column_map)


Transform = Callable[[Mapping[str, Any]], tuple[list[Sample], Question | None]]


def _transform(kind: str, rows: list[dict[str, Any]], settings: Probe, tokenizer: Any) -> Transform:
    """What makes a row's samples of it."""
    if kind == "multiple_choice":
        return lambda row: _choices(question_of(row), tokenizer)
    row_format = _format_of(rows[0], settings)
    if (kind == "text") != (row_format.format == "text"):
        raise UserError(f"dataset.kind={kind}, but the rows look like {row_format.label}; set another, or kind=auto")
    if kind == "text":
        encode = TextToTokens(tokenizer, row_format.columns["text"])
        return lambda row: ([encode(row)], None)
    messages, tokenize = RowToMessages(row_format, tokenizer=tokenizer), SFTTransform(model_transform=tokenizer)
    return lambda row: ([plain(tokenize(messages(row)))], None)


def _choices(question: Question, tokenizer: Any) -> tuple[list[Sample], Question]:
    """A sample for each choice. As in lm-eval a choice's tokens are those that the complete text has after the context's."""
    if question.is_dialogue:
        return [_dialogue(question.context, choice, tokenizer) for choice in question.choices], question
    start = len(tokenizer.encode(question.context, add_bos=True, add_eos=False))
    samples = []
    for choice in question.choices:
        tokens = list(tokenizer.encode(f"{question.context} {choice}", add_bos=True, add_eos=False))
        samples.append({"tokens": tokens, "labels": [IGNORE_INDEX] * start + tokens[start:]})
    return samples, question


def _dialogue(question: str, answer: str, tokenizer: Any) -> Sample:
    """A user turn and the assistant's, which is the target, as in training."""
    messages = [Message(role="user", content=question, masked=True), Message(role="assistant", content=answer)]
    return plain(SFTTransform(model_transform=tokenizer)({"messages": messages}))


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

    Raises UserError if a field is missing or of another type, or the answer is none of the choices.
    """
    # First, since TOFU's rows have a plain question and answer as well.
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
    # Labels before positions: rows of ARC may count from 1, and their "1" is the first choice.
    for names in (labels or [], choices, [chr(ord("A") + index) for index in range(len(choices))]):
        if text in names:
            return list(names).index(text)
    if text.isdecimal() and int(text) < len(choices):
        return int(text)
    raise UserError(f"its field {field!r} is {text[:40]!r}, which names none of the {len(choices)} choices")
