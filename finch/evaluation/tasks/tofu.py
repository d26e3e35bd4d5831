"""TOFU, the paper's knowledge task: which of six answers to a paraphrased question is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finch.base.errors import UserError
from finch.evaluation.results import Sample
from finch.evaluation.tasks import task
from finch.evaluation.tasks.task import Record, Row, Source

_FIELDS = ("question", "paraphrased_question", "paraphrased_answer", "perturbed_answer")
PERTURBED = Source("tofu/forget10_perturbed.jsonl", "locuslab/TOFU", "train", _FIELDS, "forget10_perturbed")
FULL = Source("tofu/full.jsonl", "locuslab/TOFU", "train", ("question", "answer"), "full")
LETTERS = "ABCDEF"
SEED = 0
VALIDATION_FRACTION = 0.1


def dataset(
    data_root: str | None = None, has_chat_template: bool = False, part: str = "all", is_letters: bool = False, **_: Any
) -> dict[str, Any]:
    """Documents with ``prompt``, ``choices`` and ``gold``; the options' order depends on the row's question.

    Args:
        data_root: None: rows of the hub.
        has_chat_template: whether the prompt becomes a user's turn.
        part: ``all`` rows, or ``validation``: those whose question is not in the training part of ``finch.data.tofu`` with its defaults.
        is_letters: whether the prompt lists the options, and the choices are letters.
    """
    rows = PERTURBED.load(data_root)
    if part == "validation":
        from finch.data.rows import train_validation_split

        all_rows = task.table(FULL.load(data_root))
        held_out = set(train_validation_split(all_rows, "validation", VALIDATION_FRACTION, SEED)["question"])
        rows = [row for row in rows if row["question"] in held_out]
        if not rows:
            raise UserError(f"tofu_validation: no row of {PERTURBED.file} is in the validation part of {FULL.file}")
    return {"test": task.table([_document(row, has_chat_template, is_letters) for row in rows])}


def _document(row: Row, has_chat_template: bool, is_letters: bool) -> Row:
    answers = [row["paraphrased_answer"], *row["perturbed_answer"]]
    order = task.shuffled(len(answers), f"{SEED}\n{row['question']}")
    options = [answers[index] for index in order]
    question = row["paraphrased_question"]
    if is_letters:
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))])
    return {
        "question": row["question"],
        "prompt": task.plain_or_chat(question, has_chat_template),
        "choices": list(LETTERS[: len(options)]) if is_letters else options,
        "gold": order.index(0),
    }


@task.by_document
def samples(record: Record, letters: Record) -> Sample:
    """With the six log-likelihoods of the answers and of the letters."""
    return {
        **task.chosen(record, record["doc"]["gold"], "acc_norm"),
        "acc": float(record["acc"]),
        "acc_letters": float(letters["acc"]),
        "question": record["doc"]["question"],
        "lengths": [len(choice) for choice in record["doc"]["choices"]],
        "letter_loglikelihoods": task.log_likelihoods(letters),
    }


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {
        "acc": task.mean(samples, "acc"),
        "acc_letters": task.mean(samples, "acc_letters"),
        "acc_norm_seen": task.mean([sample for sample in samples if sample.get("is_seen") is True], "score"),
        "acc_norm_unseen": task.mean([sample for sample in samples if sample.get("is_seen") is False], "score"),
    }
