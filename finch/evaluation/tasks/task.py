"""What a task is: its metric, its prompt, its rows, and how lm-eval's results become ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch.errors import UserError
from finch.evaluation.results import Sample
from finch.evaluation.tasks.rows import Source

Record = Mapping[str, Any]
"""A document as lm-eval logs it: doc_id, doc_hash, doc, filtered_resps, and its metrics."""
Records = Mapping[str, Sequence[Record]]
"""Of each lm-eval task, its documents."""

PLAIN_PROMPT = "Question: {}\nAnswer:"
"""Stands in for a chat template where the tokenizer has none."""


@dataclass(frozen=True)
class Task:
    """A task of `finch evaluate`.

    Attributes:
        name: of the task in results.
        suite: to which it belongs.
        role: ``new``, ``old`` or ``reliability``, see ``finch.evaluation.results``.
        metric: the headline metric, a score for each document.
        measure: what is measured and how, without the prompt's form.
        lm_eval_names: the lm-eval tasks that it runs; their documents are joined.
        sources: its rows, the first one those that are scored.
        read_samples: from lm-eval's documents to samples; its argument has the ``lm_eval_names`` in their order.
        compute_others: from samples to further metrics.
        uses_chat_template: whether the prompt is a user's turn where the tokenizer has a chat template.
        chance: the expected score of a model that guesses; None where there is no such number.
        is_higher_better: False for errors.
        is_judged: whether only answers are written, which `finch judge` scores.
        is_divided: whether the documents are divided among ``lm_eval_names``; otherwise each of these has all documents.
    """

    name: str
    suite: str
    role: str
    metric: str
    measure: str
    lm_eval_names: tuple[str, ...]
    sources: tuple[Source, ...]
    read_samples: Callable[[Records], list[Sample]]
    compute_others: Callable[[Sequence[Sample]], dict[str, float | None]]
    uses_chat_template: bool
    chance: float | None
    is_higher_better: bool = True
    is_judged: bool = False
    is_divided: bool = False

    def definition(self, has_chat_template: bool) -> str:
        """What was measured and how, in a sentence.

        Args:
            has_chat_template: whether the tokenizer has one.
        """
        if not self.uses_chat_template:
            prompt = "no chat template"
        elif has_chat_template:
            prompt = "chat template"
        else:
            prompt = "plain prompt, since the tokenizer has no chat template"
        return f"{self.measure}; 0-shot; {prompt}"

    def samples(self, records: Records, training_questions: Collection[str] | None = None) -> list[Sample]:
        """Each document's result, sorted by doc_id.

        Args:
            records: lm-eval's logged samples, of ``lm_eval_names`` and perhaps of other tasks.
            training_questions: those that the model was tuned on. Samples that name their question then say ``is_seen``; without them it
                is unknown.
        """
        samples = self.read_samples({name: records[name] for name in self.lm_eval_names})
        for sample in samples:
            if training_questions is not None and "question" in sample:
                sample["is_seen"] = sample["question"] in training_questions
        return samples

    def others(self, samples: Sequence[Sample]) -> dict[str, float | None]:
        """Further metrics by name; None where no sample counts."""
        return self.compute_others(samples)

    def check_data(self, data_root: Path | None) -> None:
        """
        Args:
            data_root: folder of local rows; None: the hub, where nothing is checked.

        Raises:
            UserError: a file is missing or empty.
        """
        if data_root is None:
            return
        for source in self.sources:
            if not source.files(data_root):
                raise UserError(
                    f"{self.name}: {data_root / source.file} does not exist or is empty; fetch it: {source.fetch(data_root)}"
                )


def plain_or_chat(question: str, has_chat_template: bool) -> str:
    """The text of the user's turn, or the plain prompt that stands in for it."""
    return question if has_chat_template else PLAIN_PROMPT.format(question)


def log_likelihoods(record: Record) -> list[float]:
    """Of each choice, in nats."""
    return [float(response[0]) for response in record["filtered_resps"]]


def response(record: Record) -> str:
    """The generated text."""
    return str(record["filtered_resps"][0])


def identity(record: Record) -> Sample:
    """A sample's doc_id and doc_hash."""
    return {"doc_id": record["doc_id"], "doc_hash": record["doc_hash"]}


def by_doc_id(records: Sequence[Record]) -> dict[Any, Record]:
    """In the order of doc_id, whatever the number of processes that evaluated them."""
    return {record["doc_id"]: record for record in sorted(records, key=lambda record: record["doc_id"])}


def mean(samples: Sequence[Sample], key: str) -> float | None:
    """Over the samples that have a value for it; None if none has."""
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return sum(values) / len(values) if values else None
