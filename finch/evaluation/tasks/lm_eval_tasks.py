"""HellaSwag, WinoGrande and MMLU, which lm-eval has: local rows in the form that its tasks read, and their samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from finch.errors import UserError
from finch.evaluation.results import Sample
from finch.evaluation.tasks.rows import Row, Source, table
from finch.evaluation.tasks.task import Record, Records, by_doc_id, identity, log_likelihoods, mean

HELLASWAG = Source(
    "hellaswag/validation.jsonl", "Rowan/hellaswag", "validation", ("activity_label", "ctx", "endings", "label")
)
WINOGRANDE = Source(
    "winogrande/validation.jsonl",
    "allenai/winogrande",
    "validation",
    ("sentence", "option1", "option2", "answer"),
    "winogrande_xl",
)
_MMLU_FIELDS = ("question", "choices", "answer", "subject")
MMLU = Source("mmlu/test.jsonl", "cais/mmlu", "test", _MMLU_FIELDS, "all")
MMLU_DEV = Source("mmlu/dev.jsonl", "cais/mmlu", "dev", _MMLU_FIELDS, "all")

SUBJECTS = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge", "college_biology"),
    *("college_chemistry", "college_computer_science", "college_mathematics", "college_medicine", "college_physics"),
    *("computer_security", "conceptual_physics", "econometrics", "electrical_engineering", "elementary_mathematics"),
    *("formal_logic", "global_facts", "high_school_biology", "high_school_chemistry", "high_school_computer_science"),
    *("high_school_european_history", "high_school_geography", "high_school_government_and_politics"),
    *("high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics", "high_school_physics"),
    *("high_school_psychology", "high_school_statistics", "high_school_us_history", "high_school_world_history"),
    *("human_aging", "human_sexuality", "international_law", "jurisprudence", "logical_fallacies", "machine_learning"),
    *("management", "marketing", "medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition"),
    *("philosophy", "prehistory", "professional_accounting", "professional_law", "professional_medicine"),
    *("professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy", "virology"),
    "world_religions",
)
"""MMLU's, an lm-eval task each."""

_LAST_SENTENCE = re.compile(r"(?s)(.*[.!?][\"')\]]*) ([^.!?]+)")


def hellaswag_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``activity_label``, ``ctx_a``, ``ctx_b``, ``endings`` and ``label``, as on the hub.

    lm-eval capitalizes ``ctx_b``, the beginning of the sentence that an ending completes. Rows that have ``ctx`` alone, the two joined,
    are cut after the last full sentence.
    """
    return {"validation": table([_split_context(row) for row in HELLASWAG.load(data_root)])}


def _split_context(row: Row) -> Row:
    if "ctx_a" in row and "ctx_b" in row:
        return row
    match = _LAST_SENTENCE.fullmatch(row["ctx"])
    start, rest = match.groups() if match else (row["ctx"], "")
    return {**row, "ctx_a": start, "ctx_b": rest}


def winogrande_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``sentence``, ``option1``, ``option2`` and ``answer``, as on the hub."""
    return {"validation": table(WINOGRANDE.load(data_root))}


def mmlu_dataset(data_root: str, subject: str, **_: Any) -> dict[str, Any]:
    """One subject's rows with ``question``, ``choices``, ``answer`` and ``subject``, as on the hub.

    Raises:
        UserError: there are no rows of the subject.
    """
    rows = {
        split: [row for row in source.load(data_root) if row["subject"] == subject] for split, source in _MMLU.items()
    }
    if not rows["test"]:
        raise UserError(f"mmlu: {data_root}/{MMLU.file} has no rows of the subject {subject}; all 57 are needed")
    return {split: table(part) for split, part in rows.items()}


_MMLU = {"dev": MMLU_DEV, "test": MMLU}


def multiple_choice_sample(record: Record, metric: str, choices: Sequence[str]) -> Sample:
    """A sample with the log-likelihoods of all choices.

    Args:
        metric: the headline metric.
        choices: the texts that are compared, whose lengths in characters are kept.
    """
    target = record["target"]
    return {
        **identity(record),
        "score": float(record[metric]),
        "acc": float(record["acc"]),
        "answer": int(target),
        "loglikelihoods": log_likelihoods(record),
        "lengths": [len(choice) for choice in choices],
    }


def hellaswag_samples(records: Records) -> list[Sample]:
    return [
        multiple_choice_sample(record, "acc_norm", record["doc"]["choices"])
        for record in by_doc_id(records["hellaswag"]).values()
    ]


def hellaswag_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {"acc": mean(samples, "acc")}


def winogrande_samples(records: Records) -> list[Sample]:
    """lm-eval compares how likely the rest of the sentence is after each option."""
    samples = []
    for record in by_doc_id(records["winogrande"]).values():
        loglikelihoods = log_likelihoods(record)
        answer = int(record["doc"]["answer"]) - 1
        samples.append(
            {**identity(record), "score": float(record["acc"]), "answer": answer, "loglikelihoods": loglikelihoods}
        )
    return samples


def mmlu_samples(records: Records) -> list[Sample]:
    """Of all subjects; a doc_id is the subject and lm-eval's number in it."""
    samples = []
    for subject in SUBJECTS:
        for record in by_doc_id(records[f"mmlu_{subject}"]).values():
            samples.append(
                {
                    "doc_id": f"{subject}/{record['doc_id']}",
                    "doc_hash": record["doc_hash"],
                    "score": float(record["acc"]),
                    "subject": subject,
                    "answer": int(record["doc"]["answer"]),
                    "loglikelihoods": log_likelihoods(record),
                }
            )
    return samples


def mmlu_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The mean of the subjects' means; the headline is the mean of the documents."""
    subjects = [
        mean([sample for sample in samples if sample["subject"] == subject], "score")
        for subject in sorted({sample["subject"] for sample in samples})
    ]
    return {"acc_subjects": sum(score for score in subjects if score is not None) / len(subjects) if subjects else None}


def no_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {}
