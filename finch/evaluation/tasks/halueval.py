"""HaluEval's questions with a right and a hallucinated answer: which is hallucinated, in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finch.evaluation.results import Sample
from finch.evaluation.tasks.task import Record, Row, Source, average, by_document, chosen, table

_FIELDS = ("question", "right_answer", "hallucinated_answer")
ROWS = Source("halueval/qa.jsonl", "pminervini/HaluEval", "data", _FIELDS, "qa")
PROMPT = "Question: {question}\nA. {a}\nB. {b}\nOne of these two answers is right, the other one is hallucinated. Which answer is hallucinated? Reply with its letter, A or B."
LETTERS = ["A", "B"]


def dataset(data_root: str | None = None, has_chat_template: bool = False, **_: Any) -> dict[str, Any]:
    """Two documents per row, one after the other: with the hallucinated answer as A, then as B."""
    clusters: dict[str, int] = {}
    documents = [
        _document(row, gold, clusters.setdefault(row["question"], len(clusters)), has_chat_template)
        for row in ROWS.load(data_root)
        for gold in (0, 1)
    ]
    return {"test": table(documents)}


def _document(row: Row, gold: int, cluster: int, has_chat_template: bool) -> Row:
    answers = [row["right_answer"], row["hallucinated_answer"]]
    a, b = answers if gold == 1 else reversed(answers)
    prompt = PROMPT.format(question=row["question"], a=a, b=b)
    return {
        "prompt": prompt if has_chat_template else f"{prompt}\nAnswer:",
        "choices": LETTERS,
        "gold": gold,
        "cluster": cluster,
        "lengths": [len(a), len(b)],
    }


@by_document
def samples(record: Record) -> Sample:
    """Both orders of a question are a cluster."""
    document = record["doc"]
    return {**chosen(record, document["gold"]), "cluster": document["cluster"], "lengths": document["lengths"]}


def others(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The score of always picking the longer answer (1/2 where both are as long), which needs no model."""
    return {"pick_longer": average(map(_pick_longer, samples))}


def _pick_longer(sample: Sample) -> float:
    hallucinated, right = sample["lengths"][sample["answer"]], sample["lengths"][1 - sample["answer"]]
    return 0.5 if hallucinated == right else float(hallucinated > right)
