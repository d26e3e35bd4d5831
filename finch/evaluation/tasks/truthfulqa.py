"""TruthfulQA as lm-eval has it: the probability of all true answers (mc2), and whether the likeliest answer is the best one (mc1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finch.evaluation.results import Sample
from finch.evaluation.tasks.rows import Row, Source, table
from finch.evaluation.tasks.task import Records, by_doc_id, identity, log_likelihoods, mean

ROWS = Source(
    "truthfulqa/mc_task.jsonl",
    "truthfulqa/truthful_qa",
    "validation",
    ("question", "mc1_targets", "mc2_targets"),
    "multiple_choice",
)


def local_dataset(data_root: str, **_: Any) -> dict[str, Any]:
    """Rows with ``question``, ``mc1_targets`` and ``mc2_targets``, in the hub's form."""
    return {"validation": table([hub_row(row) for row in ROWS.load(data_root)])}


def hub_row(row: Row) -> Row:
    """Targets as ``{choices: [...], labels: [...]}``; the authors' file has them as ``{choice: label}``."""
    return {**row, **{field: _targets(row[field]) for field in ("mc1_targets", "mc2_targets")}}


def _targets(targets: dict[str, Any]) -> dict[str, Any]:
    if targets.keys() == {"choices", "labels"}:
        return targets
    return {"choices": list(targets), "labels": list(targets.values())}


def samples(records: Records) -> list[Sample]:
    """With the log-likelihoods of the answers of mc2, their labels, and those of mc1, whose first answer is the right one."""
    mc1 = by_doc_id(records["truthfulqa_mc1"])
    return [
        {
            **identity(record),
            "score": float(record["acc"]),
            "mc1": float(mc1[doc_id]["acc"]),
            "labels": [int(label) for label in record["doc"]["mc2_targets"]["labels"]],
            "loglikelihoods": log_likelihoods(record),
            "mc1_loglikelihoods": log_likelihoods(mc1[doc_id]),
        }
        for doc_id, record in by_doc_id(records["truthfulqa_mc2"]).items()
    ]


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """mc1, and the mc2 of a model that finds all answers equally likely: the share of true ones."""
    uniform = [{"score": sum(sample["labels"]) / len(sample["labels"])} for sample in samples]
    return {"mc1": mean(samples, "mc1"), "mc2_uniform": mean(uniform, "score")}
