"""SciKnowEval's Chemistry rows of level 3 (Feng et al., 2024), the paper's science task, as questions and answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.datasets import PackedDataset

from finch.base.errors import UserError
from finch.base.log import logger
from finch.data.formats import RowFormat
from finch.data.row_files import ALL, PARTS, check_fractions, part_indices
from finch.data.rows import Rows, check_packing, check_part, files_and_source, load_table, tokenized
from finch.data.table import Table

FIELDS = ("prompt", "question", "choices", "answerKey", "answer", "solution")
REQUIRED = ("question", "choices", "answerKey", "answer")
SOLUTION_FIELDS = ("messages", "output_text")
_QUESTION_ANSWER = RowFormat("question_answer", {"question": "question", "answer": "answer"})


def sciknoweval_dataset(
    tokenizer: Any,
    *,
    source: str = "hicai-zju/SciKnowEval",
    name: str | None = "v2",
    split: str | None = None,
    data_files: str | list[str] | None = None,
    domain: str | None = "Chemistry",
    level: str | None = "L3",
    part: str = "train",
    validation_fraction: float = 0.05,
    test_fraction: float = 0.25,
    split_seed: int = 0,
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    new_system_prompt: str | None = None,
    packed: bool = False,
) -> Rows | PackedDataset:
    """One part of a domain's rows of one level: 70% to train, 5% to validate, 25% to test, whatever the file's order. Rows with equal
    questions stay together, see :func:`finch.data.row_files.part_indices`. All rows are split, those without choices as well.

    The user's turn is ``prompt_of(row)``, the assistant's ``target_of(row)``: the row's ``solution`` where it has one, otherwise its
    plain answer. A log line says how many rows have which. The paper trains on gpt-4o's solutions: :func:`sciknoweval_solutions_dataset`.

    Args:
        source: a hub name; ignored with ``data_files``.
        split: the hub's or file's split; None: ``test`` on the hub, where all rows are, and ``train`` of a file, which has no other.
        data_files: local rows of SciKnowEval's fields.
        domain, level: of the rows, by their fields ``domain`` and ``details.level``; None: rows of any.
        validation_fraction, test_fraction: shares of the rows, in [0, 1).
        column_map: from ``prompt``, ``question``, ``choices``, ``answerKey``, ``answer`` and ``solution`` to columns of other names.
        The others are those of :func:`finch.data.rows.rows_dataset`.

    Raises UserError for rows without the fields or of other domains and levels, an argument out of range, an empty part, and packing without
    max_seq_len.
    """
    check_part(part, PARTS)
    check_packing(tokenizer, packed)
    check_fractions(part, validation_fraction, test_fraction)
    table, reader = _load(source, name, split, data_files)
    columns = _columns(table.column_names, column_map)
    shares = {"validation_fraction": validation_fraction, "test_fraction": test_fraction, "seed": split_seed}
    table = table.select(_part(table, columns, _rows_of(table, domain, level), part, shares))
    _log_targets(table, columns, part)
    return tokenized(
        tokenizer,
        table,
        dataclasses.replace(_QUESTION_ANSWER, source=reader),
        convert=functools.partial(to_question_answer, columns),
        train_on_input=train_on_input,
        new_system_prompt=new_system_prompt,
        packed=packed,
    )


def sciknoweval_solutions_dataset(
    tokenizer: Any,
    *,
    data_files: str | list[str],
    questions: str | list[str] | None = None,
    source: str = "hicai-zju/SciKnowEval",
    name: str | None = "v2",
    domain: str | None = "Chemistry",
    level: str | None = "L3",
    part: str = "train",
    validation_fraction: float = 0.05,
    test_fraction: float = 0.25,
    split_seed: int = 0,
    packed: bool = False,
) -> Rows | PackedDataset:
    """Written solutions to one part's questions, in the form of Shenfeld et al.'s Self-Distillation repository (data/science_data/train_data,
    by gpt-4o, no licence stated): ``messages``, the prompt's turns, and ``output_text``, the answer.

    The parts are :func:`sciknoweval_dataset`'s, so that no question that is scored is trained on: a solution belongs to the longest of
    SciKnowEval's questions that its user's turn contains, whatever the white space. Those to other questions are left out; a log line counts them.

    Args:
        data_files: the solutions, such as ``train_data/*.arrow``.
        questions: local rows of SciKnowEval's fields, in place of ``source`` and ``name``.
        The others are those of :func:`sciknoweval_dataset`.

    Raises UserError for rows without the fields, an argument out of range, and a part without solutions.
    """
    check_part(part, PARTS)
    check_packing(tokenizer, packed)
    check_fractions(part, validation_fraction, test_fraction)
    asked, _ = _load(source, name, None, questions)
    columns = _columns(asked.column_names, None)
    rows = _rows_of(asked, domain, level)
    texts = [_plain(text) for text in asked[columns["question"]]]
    shares = {"validation_fraction": validation_fraction, "test_fraction": test_fraction, "seed": split_seed}
    chosen = {texts[row] for row in _part(asked, columns, rows, part, shares)}
    by_length = sorted({texts[row] for row in rows} - {""}, key=len, reverse=True)

    table, reader = _load(source, name, None, data_files)
    if missing := [field for field in SOLUTION_FIELDS if field not in table.column_names]:
        raise UserError(
            f"dataset.data_files: the rows have no field {missing[0]!r}; solutions have {' and '.join(SOLUTION_FIELDS)}"
        )
    found = [_question_in(messages, by_length) for messages in table["messages"]]
    indices = [index for index, question in enumerate(found) if question in chosen]
    logger.info(
        f"SciKnowEval, {part}: {len(indices):,} of {len(found):,} solutions; {found.count(None):,} are to none of its {len(rows):,} questions"
    )
    if not indices:
        raise UserError(f"dataset.data_files={data_files} has no solution to a question of part={part}; check the file")
    rows_format = RowFormat("prompt_completion", {"prompt": "messages", "completion": "output_text"}, reader)
    chosen_rows = table.select(indices)
    return tokenized(tokenizer, chosen_rows, rows_format, train_on_input=False, new_system_prompt=None, packed=packed)


def _load(source: str, name: str | None, split: str | None, data_files: str | list[str] | None) -> tuple[Table, str]:
    """The rows of ``data_files``, or without them those of the hub, where all are in the split ``test``; and their reader."""
    is_hub = data_files is None
    files, reader = files_and_source(source if is_hub else None, data_files)
    split = split or ("test" if is_hub else "train")
    return load_table(reader, data_files, files, name=name if is_hub else None, split=split), reader


def _question_in(messages: Any, questions: Sequence[str]) -> str | None:
    """The first of ``questions`` that a user's turn contains."""
    turns = messages if isinstance(messages, list) else []
    text = _plain("\n".join(str(turn.get("content")) for turn in turns if turn.get("role") == "user"))
    return next((question for question in questions if question in text), None)


def _plain(text: Any) -> str:
    """With single spaces; a field without a value is empty."""
    return " ".join(str(text or "").split())


def to_question_answer(columns: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, str]:
    """From a row of SciKnowEval to one of question and answer.

    Args:
        columns: from SciKnowEval's fields to the row's columns.

    Raises:
        UserError: a field is missing, or the answer is none of the choices.
    """
    row = {field: row[column] for field, column in columns.items()}
    return {"question": prompt_of(row), "answer": target_of(row)}


def prompt_of(row: Mapping[str, Any]) -> str:
    """The row's instruction (its field ``prompt.default``), an empty line, the question, and a line ``A. text`` for each choice. Raises
    UserError if there is no question."""
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError("its field 'question' is missing or null")
    prompt = row.get("prompt")
    instruction = prompt.get("default") if isinstance(prompt, Mapping) else prompt
    lines = [f"{label}. {text}" for label, text in choices_of(row).items()]
    return "\n\n".join(filter(None, [instruction, "\n".join([question, *lines])]))


def target_of(row: Mapping[str, Any]) -> str:
    """The row's ``solution``; without one, of a multiple-choice row ``C. text`` with the right choice's letter and text, of another row its
    ``answer``. Raises UserError if there is neither, or the right choice is none of the choices."""
    if row.get("solution"):
        return row["solution"]
    if not (choices := choices_of(row)):
        if not row.get("answer"):
            raise UserError("it has neither 'choices' nor an 'answer'")
        return row["answer"]
    letter = row.get("answerKey")
    if letter not in choices:
        raise UserError(f"its field 'answerKey' is {letter!r}, none of its choices {', '.join(choices)}")
    return f"{letter}. {choices[letter]}"


def choices_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The text of each choice by its letter; empty where the row has no choices. Raises UserError if texts and letters differ in number."""
    choices = row.get("choices") or {}
    if not isinstance(choices, Mapping):
        raise UserError(f"its field 'choices' is {type(choices).__name__}, not an object with text and label")
    letters, texts = choices.get("label") or [], choices.get("text") or []
    if len(letters) != len(texts):
        raise UserError(f"its field 'choices' has {len(texts)} texts and {len(letters)} labels")
    return dict(zip(letters, texts, strict=True))


def _columns(names: list[str], column_map: Mapping[str, str] | None) -> dict[str, str]:
    column_map = column_map or {}
    if unknown := next((field for field in column_map if field not in FIELDS), None):
        raise UserError(
            f"dataset.column_map.{unknown}: rows of SciKnowEval have no such field, they have {', '.join(FIELDS)}"
        )
    columns = {field: str(column_map.get(field, field)) for field in FIELDS}
    for field, column in columns.items():
        if column not in names and (field in REQUIRED or field in column_map):
            raise UserError(
                f"dataset: the rows have no field {column!r}, as SciKnowEval's have; they have {', '.join(names)}: name its column, dataset.column_map.{field}=COLUMN"
            )
    return {field: column for field, column in columns.items() if column in names}


def _rows_of(table: Table, domain: str | None, level: str | None) -> list[int]:
    """The numbers of the rows of a domain and level, from 0."""
    for key, value, column in (("domain", domain, "domain"), ("level", level, "details")):
        if value is not None and column not in table.column_names:
            raise UserError(
                f"dataset.{key}={value} needs rows with a field {column!r}; set dataset.{key}=null to take all of them"
            )
    nothing = [None] * len(table)
    domains = nothing if domain is None else table["domain"]
    details = nothing if level is None else table["details"]
    kinds = [(name, (each or {}).get("level")) for name, each in zip(domains, details, strict=True)]
    indices = [index for index, kind in enumerate(kinds) if kind == (domain, level)]
    if not indices:
        known = ", ".join(sorted({" ".join(str(name) for name in kind if name is not None) for kind in kinds}))
        raise UserError(f"dataset.domain={domain} dataset.level={level} has no rows; the rows are of {known}")
    return indices


def _part(table: Table, columns: Mapping[str, str], indices: list[int], part: str, shares: dict[str, Any]) -> list[int]:
    """The numbers of a part's rows, of those in ``indices``; ``shares`` are arguments of :func:`part_indices`."""
    if part == ALL:
        return indices
    questions, choices = (list(table[columns[field]]) for field in ("question", "choices"))
    contents = [(questions[index], choices[index]) for index in indices]
    return [indices[index] for index in part_indices(contents, part, **shares)]


def _log_targets(table: Table, columns: Mapping[str, str], part: str) -> None:
    solutions = table[columns["solution"]] if "solution" in columns else [None] * len(table)
    plain = [choices for solution, choices in zip(solutions, table[columns["choices"]], strict=True) if not solution]
    num_letters = sum(isinstance(choices, Mapping) and bool(choices.get("label")) for choices in plain)
    logger.info(
        f"SciKnowEval, {part}: {len(table):,} rows, targets are {len(table) - len(plain):,} solutions and {len(plain):,} plain answers ({num_letters:,} letters with their choice, {len(plain) - num_letters:,} texts)"
    )
