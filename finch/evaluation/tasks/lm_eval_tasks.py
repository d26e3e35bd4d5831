"""HellaSwag, WinoGrande, MMLU, IFEval and TruthfulQA, which lm-eval has: local rows in the form that its tasks read, and their samples."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from finch.base.errors import UserError
from finch.evaluation.results import Sample
from finch.evaluation.tasks import task
from finch.evaluation.tasks.task import Record, Records, Row, Source

_HELLASWAG = ("activity_label", "endings", "label")
_WINOGRANDE = ("sentence", "option1", "option2", "answer")
_TRUTHFULQA = ("question", "mc1_targets", "mc2_targets")
HELLASWAG = Source("hellaswag/validation.jsonl", "Rowan/hellaswag", "validation", _HELLASWAG)
WINOGRANDE = Source("winogrande/validation.jsonl", "allenai/winogrande", "validation", _WINOGRANDE, "winogrande_xl")
_MMLU = ("question", "choices", "answer", "subject")
MMLU = Source("mmlu/test.jsonl", "cais/mmlu", "test", _MMLU, "all")
MMLU_DEV = Source("mmlu/dev.jsonl", "cais/mmlu", "dev", _MMLU, "all")
IFEVAL = Source("ifeval/prompts.jsonl", "google/IFEval", "train", ("key", "prompt", "instruction_id_list", "kwargs"))
TRUTHFULQA = Source("truthfulqa/mc_task.jsonl", "truthfulqa/truthful_qa", "validation", _TRUTHFULQA, "multiple_choice")
IFEVAL_SEED = 0

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
"""Of MMLU; each is a task of lm-eval."""

_LAST_SENTENCE = re.compile(r"(?s)(.*[.!?][\"')\]]*) ([^.!?]+)")


def hellaswag_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``activity_label``, ``ctx_a``, ``ctx_b``, ``endings`` and ``label``, as on the hub.

    lm-eval capitalizes ``ctx_b``, the beginning of the sentence that an ending completes. Rows that have only ``ctx``, the two joined,
    are cut after the last full sentence.
    """
    return {"validation": task.table([_split_context(row) for row in HELLASWAG.load(data_root)])}


def _split_context(row: Row) -> Row:
    if "ctx_a" in row and "ctx_b" in row:
        return row
    if "ctx" not in row:
        raise UserError(
            f"hellaswag: a row has neither ctx_a and ctx_b nor ctx, only {', '.join(row)}; each row needs them"
        )
    match = _LAST_SENTENCE.fullmatch(row["ctx"])
    start, rest = match.groups() if match else (row["ctx"], "")
    return {**row, "ctx_a": start, "ctx_b": rest}


def winogrande_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``sentence``, ``option1``, ``option2`` and ``answer``, as on the hub."""
    return {"validation": task.table(WINOGRANDE.load(data_root))}


def mmlu_dataset(data_root: str, subject: str, **_: Any) -> dict[str, Any]:
    """One subject's rows with ``question``, ``choices``, ``answer`` and ``subject``, as on the hub.

    Raises:
        UserError: there are no rows of the subject.
    """
    rows = {
        split: [row for row in source.load(data_root) if row["subject"] == subject]
        for split, source in (("dev", MMLU_DEV), ("test", MMLU))
    }
    if not rows["test"]:
        raise UserError(f"mmlu: {data_root}/{MMLU.file} has no rows of the subject {subject}; all 57 are needed")
    return {split: task.table(part) for split, part in rows.items()}


@task.by_document
def hellaswag_samples(record: Record) -> Sample:
    """With the lengths of the endings in characters."""
    lengths = [len(choice) for choice in record["doc"]["choices"]]
    return {**task.chosen(record, record["target"], "acc_norm"), "acc": float(record["acc"]), "lengths": lengths}


def hellaswag_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {"acc": task.mean(samples, "acc")}


@task.by_document
def winogrande_samples(record: Record) -> Sample:
    """lm-eval compares how likely the rest of the sentence is after each option."""
    return task.chosen(record, int(record["doc"]["answer"]) - 1)


def mmlu_samples(records: Records) -> list[Sample]:
    """Of all subjects; a doc_id is the subject and lm-eval's number in it."""
    return [
        {
            "doc_id": f"{subject}/{record['doc_id']}",
            "doc_hash": record["doc_hash"],
            "subject": subject,
            **task.chosen(record, record["doc"]["answer"]),
        }
        for subject in SUBJECTS
        for record in task.by_doc_id(records[f"mmlu_{subject}"]).values()
    ]


def mmlu_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The mean of the subjects' means; the headline is the mean of the documents."""
    scores: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["subject"]):
        scores.setdefault(sample["subject"], []).append(sample["score"])
    return {"acc_subjects": task.average(sum(each) / len(each) for each in scores.values())}


def ifeval_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``, as on the hub."""
    return {"train": task.table(IFEVAL.load(data_root))}


def ifeval_plain_prompt(document: Row) -> str:
    return task.plain_or_chat(document["prompt"], has_chat_template=False)


def ifeval_results(document: Row, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's results of a document, with its random choices fixed: those of langdetect, and arguments that it draws where a row's are 0."""
    from lm_eval.tasks.ifeval import instructions, utils

    instructions.langdetect.DetectorFactory.seed = IFEVAL_SEED
    state = random.getstate()
    random.seed(document["key"])
    try:
        return utils.process_results(document, responses)
    finally:
        random.setstate(state)


@task.by_document
def ifeval_samples(record: Record) -> Sample:
    """With lm-eval's four results, of the prompt and of each of its instructions, and the response."""
    return {
        "score": float(record["prompt_level_strict_acc"]),
        "prompt_level_loose_acc": float(record["prompt_level_loose_acc"]),
        "inst_level_strict_acc": [bool(value) for value in record["inst_level_strict_acc"]],
        "inst_level_loose_acc": [bool(value) for value in record["inst_level_loose_acc"]],
        "response": task.response(record),
    }


def ifeval_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The other three accuracies, those of instructions over all of them, and the responses' mean length in words."""
    return {
        "prompt_level_loose_acc": task.mean(samples, "prompt_level_loose_acc"),
        "inst_level_strict_acc": task.average(value for sample in samples for value in sample["inst_level_strict_acc"]),
        "inst_level_loose_acc": task.average(value for sample in samples for value in sample["inst_level_loose_acc"]),
        "response_words": task.average(len(sample["response"].split()) for sample in samples),
    }


def truthfulqa_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``question``, ``mc1_targets`` and ``mc2_targets``, in the hub's form."""
    return {"validation": task.table([truthfulqa_row(row) for row in TRUTHFULQA.load(data_root)])}


def truthfulqa_row(row: Row) -> Row:
    """Targets as ``{choices: [...], labels: [...]}``; the authors' file has them as ``{choice: label}``."""
    return {**row, **{field: _targets(row[field]) for field in ("mc1_targets", "mc2_targets")}}


def _targets(targets: dict[str, Any]) -> dict[str, Any]:
    if targets.keys() == {"choices", "labels"}:
        return targets
    return {"choices": list(targets), "labels": list(targets.values())}


@task.by_document
def truthfulqa_samples(mc1: Record, mc2: Record) -> Sample:
    """With the log-likelihoods of the answers of mc2, their labels, and those of mc1, whose first answer is the right one."""
    return {
        "score": float(mc2["acc"]),
        "mc1": float(mc1["acc"]),
        "labels": [int(label) for label in mc2["doc"]["mc2_targets"]["labels"]],
        "loglikelihoods": task.log_likelihoods(mc2),
        "mc1_loglikelihoods": task.log_likelihoods(mc1),
    }


def truthfulqa_others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """mc1, and the mc2 of a model that finds all answers equally likely: the share of true ones."""
    uniform = task.average(sum(sample["labels"]) / len(sample["labels"]) for sample in samples)
    return {"mc1": task.mean(samples, "mc1"), "mc2_uniform": uniform}
