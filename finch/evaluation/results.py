"""Results of evaluations as files: a JSON for each model and suite, and next to it the samples of each of its tasks.

FOLDER/forgetting.json               scores, definitions, versions
FOLDER/forgetting.hellaswag.jsonl    a line per document: doc_id, doc_hash, score, and what the task adds

A run's FOLDER is RUN/evaluation (``finch.base.run_files.EVALUATION``). Scores are fractions as in lm-eval; only what is shown to people is in percent and points.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.base.files import make_folder, read_bytes, replace_text

FORMAT = 1
MEASURED = "measured.json"
"""In RUN/average: its validation losses and probes, by their keys in metrics.jsonl."""
_MAX_NUMBER = 1e9  # beyond it, squares of differences lose all digits

NEW, OLD, RELIABILITY = "new", "old", "reliability"
"""Roles of a task: what was learned; abilities of the pretrained model, whose loss is forgetting; truthfulness and confidence."""

POINTS, NATS, NATS_PER_CHARACTER = "points", "nats", "nats per character"
"""Units of scores."""

Sample = dict[str, Any]
"""A document's result.

doc_id, doc_hash: lm-eval's; both models of a pair have the same.
score: of the task's headline metric; None where the document does not count in its mean.
cluster: documents with the same text are not independent (such as two orders of one question); absent otherwise.
Other keys are the task's own: further metrics, log-likelihoods, a response.
"""


@dataclass(frozen=True)
class _Sample:
    """The types of what a report takes of a sample."""

    doc_id: int | str
    doc_hash: str
    score: float | None
    cluster: str | int | None = None
    confidence: float | None = None
    is_parsed: bool | None = None
    letter: str | None = None
    answer: str | int | None = None


@dataclass(frozen=True)
class TaskResult:
    """A task's result.

    Attributes:
        role: ``new``, ``old`` or ``reliability``.
        metric: the name of the headline metric, such as ``acc_norm``.
        definition: what was measured and how, in a sentence: variant, prompt or chat template, shots, scoring.
        score: mean of the samples' scores that are not None; None if there are none.
        n: how many that are.
        samples: file name, next to the JSON.
        chance: the score of a model that guesses; None where there is no such number.
        is_higher_better: False for errors such as Brier's.
        others: further metrics by name.
        rows: hash of the local files that its documents are from; None: of the hub, or of a task of lm-eval's.
        unit: ``points``: scores are fractions; ``nats``: they are losses or divergences in nats per token; ``nats per character``: losses of texts.
    """

    role: str
    metric: str
    definition: str
    score: float | None
    n: int
    samples: str
    chance: float | None = None
    is_higher_better: bool = True
    others: dict[str, float | None] = field(default_factory=dict)
    unit: str = POINTS
    rows: str | None = None


@dataclass(frozen=True)
class SuiteResult:
    """A model's results on a suite.

    Attributes:
        suite: name.
        model: the folder that was evaluated.
        weights: hash of its weights, ``finch.evaluation.loading.hash_weights``.
        is_base: whether it is the pretrained model.
        base: path of the pretrained model's JSON of the same suite, relative to the folder of this one; None for the base itself.
        settings: what changes numbers: dtype, limit (documents per task, None: all), data (a data root or ``hub``), and so on.
        versions: of finch, lm_eval, torch and transformers.
        tasks: by name.
    """

    suite: str
    model: str
    weights: str
    is_base: bool
    base: str | None
    settings: dict[str, str | int | float | bool | None]
    versions: dict[str, str]
    tasks: dict[str, TaskResult]


def write_result(folder: Path, result: SuiteResult, samples: Mapping[str, Sequence[Sample]]) -> Path:
    """Writes a suite's samples, then its JSON; each file appears complete or not at all.

    Args:
        samples: of each task; may leave out tasks whose file is there from an earlier call.

    Returns:
        The JSON's path.
    """
    make_folder(folder)
    for task, lines in samples.items():
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        replace_text(folder / result.tasks[task].samples, text)
    path = folder / f"{result.suite}.json"
    replace_text(path, json.dumps({"format": FORMAT, **asdict(result)}, indent=2, allow_nan=False) + "\n")
    return path


def read_result(path: Path) -> SuiteResult:
    """
    Raises:
        UserError: the file is missing, broken, or of a later format.
    """
    try:
        text = read_bytes(path).decode()
        is_later = json.loads(text)["format"] > FORMAT
        result = None if is_later else read_as(SuiteResult, text)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; evaluate the model again with finch evaluate") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is no result of finch evaluate ({error}); remove it and evaluate again") from error
    if result is None:
        raise UserError(f"{path} was written by a later finch; upgrade finch")
    return result


def read_results(folder: Path) -> dict[str, SuiteResult]:
    """All suites' results in a folder, by suite; empty where there are none."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def read_samples(folder: Path, task: TaskResult) -> list[Sample]:
    """
    Args:
        folder: of the suite's JSON.

    Raises:
        UserError: the file is missing or broken.
    """
    path = folder / Path(task.samples).name
    try:
        lines = read_bytes(path).decode().splitlines()
        read_as(list[_Sample], f"[{','.join(lines)}]")
        samples = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); evaluate the model again with finch evaluate") from error
    return samples


def read_as(kind: Any, text: str) -> Any:
    """A value of a type from JSON, taken strictly. Raises ValueError, one line: the first wrong place, or a number that is no score or rate."""
    from pydantic import ValidationError

    try:
        json.loads(text, parse_float=_check_number, parse_constant=_check_number)
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _check_number(text: str) -> float:
    if not abs(float(text)) <= _MAX_NUMBER:
        raise ValueError(f"the number {text} is not between +-{_MAX_NUMBER:g}")
    return float(text)


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def base_path(path: Path, result: SuiteResult) -> Path | None:
    """Where the pretrained model's JSON lies, for the result that was read from ``path``; None for the pretrained model itself."""
    return None if result.base is None else Path(os.path.normpath(path.parent / result.base))
