"""What a task is: its metric, its prompt, where its rows come from, and how lm-eval's results become ours."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.evaluation.results import Sample

Row = dict[str, Any]
Record = Mapping[str, Any]
"""A document as lm-eval logs it: doc_id, doc_hash, doc, filtered_resps, and its metrics."""
Records = Mapping[str, Sequence[Record]]
"""Of each lm-eval task, its documents."""

PLAIN_PROMPT = "Question: {}\nAnswer:"
"""Of a tokenizer without a chat template."""


@dataclass(frozen=True)
class Source:
    """Rows of one data set.

    Attributes:
        file: their path under a data root, or a pattern.
        hub: their name on the hub.
        split: on the hub.
        fields: that each row needs.
        config: on the hub; None: it has one only.
    """

    file: str
    hub: str
    split: str
    fields: tuple[str, ...]
    config: str | None = None

    def files(self, data_root: Path) -> list[Path]:
        """The files under a data root. Raises UserError if there are none, with the command that downloads them, or all are empty."""
        found = [path for path in sorted(data_root.glob(self.file)) if path.is_file() and path.stat().st_size > 0]
        if not found:
            file = data_root / self.file.replace("*", "rows")
            name = f"{self.hub!r}, {self.config!r}" if self.config else f"{self.hub!r}"
            load = f"import datasets; datasets.load_dataset({name}, split='{self.split}').to_json('{file}')"
            fetch = f'mkdir -p {file.parent} && python -c "{load}"'
            raise UserError(f"{data_root / self.file} does not exist or is empty; fetch it: {fetch}")
        return found

    def load(self, data_root: str | Path | None) -> list[Row]:
        """All rows, in their order.

        Args:
            data_root: None: from the hub.

        Raises:
            UserError: the file is missing or not JSON Lines, a row lacks a field, or the hub cannot be reached.
        """
        if data_root is not None:
            rows = [dict(row) for file in self.files(Path(data_root)) for row in _read(file, file.stat().st_mtime_ns)]
        else:
            import datasets

            try:
                rows = datasets.load_dataset(self.hub, self.config, split=self.split).to_list()
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{self.hub} cannot be loaded from the hub ({reason}); give --data-root DIR with {self.file}"
                ) from error
        name = self.hub if data_root is None else Path(data_root) / self.file
        for number, row in enumerate(rows, start=1):
            if missing := next((field for field in self.fields if field not in row), None):
                raise UserError(
                    f"{name}: row {number} has no field {missing!r}, only {', '.join(row)}; each row needs {', '.join(self.fields)}"
                )
        return rows


@lru_cache(maxsize=8)  # MMLU's subjects share a file
def _read(file: Path, mtime: int) -> tuple[Row, ...]:
    from finch.data.row_files import read_rows

    return tuple(read_rows(file, "json"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of `finch evaluate`.

    Attributes:
        name: of the task in results.
        suite: to which it belongs.
        role: ``new``, ``old`` or ``reliability``, see ``finch.evaluation.results``.
        metric: the headline metric, a score for each document.
        measure: what is measured and how, without the prompt's form.
        lm_eval_names: the lm-eval tasks that it runs; their documents are joined.
        read_samples: from lm-eval's documents to samples; its argument has the ``lm_eval_names`` in their order.
        sources: its rows, the first one those that are scored.
        uses_chat_template: whether the prompt is a user's turn where the tokenizer has a chat template.
        others: from samples to further metrics by name; None where no sample counts.
        chance: the expected score of a model that guesses; None where there is no such number.
        is_higher_better: False for errors.
        is_judged: whether only answers are written, which `finch evaluate --judge` scores.
        is_divided: whether the documents are divided among ``lm_eval_names``; otherwise each of these has all documents.
        shots: examples in the prompt.
    """

    name: str
    suite: str
    role: str
    metric: str
    measure: str
    lm_eval_names: tuple[str, ...]
    read_samples: Callable[[Records], list[Sample]]
    sources: tuple[Source, ...] = ()
    uses_chat_template: bool = True
    others: Callable[[Sequence[Sample]], dict[str, float | None]] = lambda samples: {}
    chance: float | None = None
    is_higher_better: bool = True
    is_judged: bool = False
    is_divided: bool = False
    shots: int = 0

    def definition(self, has_chat_template: bool) -> str:
        """What was measured and how, in a sentence.

        Args:
            has_chat_template: whether the tokenizer has one.
        """
        prompt = "chat template" if self.uses_chat_template else "no chat template"
        if self.uses_chat_template and not has_chat_template:
            prompt = "plain prompt, since the tokenizer has no chat template"
        return f"{self.measure}; {self.shots}-shot; {prompt}"

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

    def check_data(self, data_root: Path | None) -> None:
        """
        Args:
            data_root: folder of local rows; None: the hub, where nothing is checked.

        Raises:
            UserError: a file is missing or empty.
        """
        if data_root is not None:
            for source in self.sources:
                source.files(data_root)

    def hash_rows(self, data_root: Path) -> str | None:
        """Of the files under a data root; None for a task without sources."""
        files = [file for source in self.sources for file in source.files(data_root)]
        return _hash_files(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else None


@lru_cache(maxsize=64)
def _hash_files(files: tuple[tuple[Path, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _ in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def table(rows: Sequence[Row]) -> Any:
    """Rows as a ``datasets.Dataset``, as lm-eval takes them."""
    import datasets

    return datasets.Dataset.from_list(list(rows))


def shuffled(count: int, seed: str) -> list[int]:
    """A permutation of 0 ... count - 1 that depends only on the text ``seed``, so that it is the same in every file, version and process."""
    return sorted(range(count), key=lambda index: hashlib.blake2b(f"{seed}\n{index}".encode(), digest_size=16).digest())


def plain_or_chat(question: str, has_chat_template: bool) -> str:
    """The text of the user's turn, or the plain prompt that replaces it."""
    return question if has_chat_template else PLAIN_PROMPT.format(question)


def log_likelihoods(record: Record) -> list[float]:
    """Of each choice, in nats."""
    return [float(response[0]) for response in record["filtered_resps"]]


def chosen(record: Record, answer: Any, metric: str = "acc") -> Sample:
    """What every task has that compares choices by their log-likelihoods; ``answer`` is the right one's number."""
    return {"score": float(record[metric]), "answer": int(answer), "loglikelihoods": log_likelihoods(record)}


def response(record: Record) -> str:
    """The generated text."""
    return str(record["filtered_resps"][0])


def by_doc_id(records: Sequence[Record]) -> dict[Any, Record]:
    """In the order of doc_id, whatever the number of processes that evaluated them."""
    return {record["doc_id"]: record for record in sorted(records, key=lambda record: record["doc_id"])}


def by_document(read: Callable[..., Sample]) -> Callable[[Records], list[Sample]]:
    """Makes ``read``, from a document's record in each lm-eval task to a sample without doc_id and doc_hash, a task's ``read_samples``."""

    @wraps(read)
    def samples(records: Records) -> list[Sample]:
        first, *others = (by_doc_id(part) for part in records.values())
        return [
            {"doc_id": doc_id, "doc_hash": record["doc_hash"], **read(record, *(part[doc_id] for part in others))}
            for doc_id, record in first.items()
        ]

    return samples


def mean(samples: Sequence[Sample], key: str) -> float | None:
    """Over the samples that have a value for it; None if none has."""
    return average(sample[key] for sample in samples if sample.get(key) is not None)


def scored(samples: Sequence[Sample]) -> dict[str, Any]:
    """A task result's ``score`` and ``n``."""
    scores = [sample["score"] for sample in samples if sample["score"] is not None]
    return {"score": average(scores), "n": len(scores)}


def average(values: Iterable[float]) -> float | None:
    """None where there are no values."""
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else None
