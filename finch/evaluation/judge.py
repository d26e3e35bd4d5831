"""The language task: a language model compares a tuned model's answers with the base model's.

Each pair of answers is judged in both orders, since judges prefer a place. The score is (W + T/2)/N over wins, ties and all judgements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

from finch.base.errors import UserError
from finch.base.run_files import EVALUATION
from finch.evaluation.chat_client import ChatRequest
from finch.evaluation.results import Sample, SuiteResult, TaskResult, base_path, read_result, read_samples, write_result
from finch.evaluation.tasks.task import average, scored

SUITE, TASK = "language", "galician_alpaca"
BASE_SCORE = 0.5
"""The base model's by definition: of two equal answers, each wins as often as the other."""

VERDICTS = {"A>>B": 1.0, "A>B": 1.0, "A=B": 0.5, "B>A": 0.0, "B>>A": 0.0}
"""Verdict -> the score of answer A: win 1, tie 0.5, loss 0."""
PROMPT_VERSION = 1
"""Of judge_prompt.txt; another prompt needs another number."""
_PROMPT = resources.files(__package__).joinpath("judge_prompt.txt").read_text(encoding="utf-8")
_FIELD = re.compile(r"\{(instruction|first|second)\}")
TUNED_FIRST, BASE_FIRST = "tuned_first", "base_first"
Verdicts = Mapping[str, str | None]
"""A document's verdict in each order; None where the judge gave none that can be read."""
MIN_FIRST_ANSWERS = 20
"""A judge that gives no verdict in that many first answers is no judge."""
_IN_BRACKETS = re.compile(r"\[\[(.*?)\]\]")
_REMEDY = f"make them with: finch evaluate --suite {SUITE} --base DIR --tuned RUN --out DIR"
_JUDGED = "; judged: "  # in a definition, between how the answers were made and how they were judged


@dataclass(frozen=True)
class Prompt:
    """What the judge is told. ``name``: in a result's definition."""

    system: str
    user: str
    name: str

    @classmethod
    def of(cls, text: str = _PROMPT, name: str = str(PROMPT_VERSION)) -> Prompt:
        """A system prompt, and after a line ===== a user turn, else finch's. Raises UserError for a turn that lacks one of its three fields."""
        system, _, user = text.strip().partition("\n=====\n")
        user = user or _PROMPT.strip().partition("\n=====\n")[2]
        if missing := {"instruction", "first", "second"} - set(_FIELD.findall(user)):
            raise UserError(
                f"--prompt: the turn after ===== lacks {{{min(missing)}}}; name {{instruction}}, {{first}} and {{second}}"
            )
        return cls(system, user, name)


@dataclass(frozen=True)
class Answers:
    """A model's answers, as ``finch evaluate`` wrote them.

    Attributes:
        path: of the suite's JSON.
        result: its content.
        samples: of the language task, sorted by doc_id.
    """

    path: Path
    result: SuiteResult
    samples: list[Sample]

    @property
    def task(self) -> TaskResult:
        return self.result.tasks[TASK]


@dataclass(frozen=True)
class Comparison:
    """The answers of two models to the same prompts; in the control, both are the base model's.

    Attributes:
        base: the base model's.
        tuned: the tuned model's, to the same documents in the same order.
        model: the judge's name on the server.
        max_answer_tokens: of a judgement.
        prompt: of the judge.
        limit: of documents, the first ones; None: all.
    """

    base: Answers
    tuned: Answers
    model: str
    max_answer_tokens: int
    prompt: Prompt
    limit: int | None = None

    @cached_property
    def orders(self) -> dict[int, dict[str, ChatRequest]]:
        """By doc_id, the request with either answer first."""
        pairs = zip(self.base.samples[: self.limit], self.tuned.samples[: self.limit], strict=True)
        return {
            base["doc_id"]: {
                TUNED_FIRST: self._request(base["prompt"], tuned["response"], base["response"]),
                BASE_FIRST: self._request(base["prompt"], base["response"], tuned["response"]),
            }
            for base, tuned in pairs
        }

    @cached_property
    def requests(self) -> dict[str, ChatRequest]:
        """By key: equal ones, such as of two equal answers in both orders, are sent once."""
        return {request.key: request for orders in self.orders.values() for request in orders.values()}

    def verdicts(self, judgements: Mapping[str, str]) -> dict[int, Verdicts]:
        """By doc_id; ``judgements`` are the judge's answers by the requests' keys."""
        return {
            doc_id: {order: parse_verdict(judgements.get(request.key, "")) for order, request in orders.items()}
            for doc_id, orders in self.orders.items()
        }

    def _request(self, instruction: str, first: str, second: str) -> ChatRequest:
        texts = {"instruction": instruction, "first": first, "second": second}
        encodable = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
        user = _FIELD.sub(lambda field: encodable[field[1]], self.prompt.user)
        return ChatRequest(self.model, self.prompt.system, user, self.max_answer_tokens)


def parse_verdict(text: str) -> str | None:
    """The verdict in the last line of a judge's answer, a key of ``VERDICTS``; None where that line has none, several or another."""
    lines = text.strip().splitlines()
    verdicts = _IN_BRACKETS.findall(lines[-1]) if lines else []
    return verdicts[0] if len(verdicts) == 1 and verdicts[0] in VERDICTS else None


def score_documents(verdicts: Mapping[int, Verdicts]) -> dict[int, float | None]:
    """By doc_id, the mean over both orders of the tuned model's score: win 1, tie 0.5, loss 0; None unless both have a verdict."""
    pairs = {doc_id: _scores_in_both_orders(each) for doc_id, each in verdicts.items()}
    return {doc_id: None if pair is None else sum(pair) / 2 for doc_id, pair in pairs.items()}


def summarize(verdicts: Iterable[Verdicts]) -> dict[str, float | None]:
    """Shares of wins, ties and losses among the judgements of documents with two verdicts, of documents on whose outcome both orders
    agree, of judgements without a verdict, and of the verdicts the score of the answer that came first (0.5: the place does not matter).
    """
    documents = list(verdicts)
    pairs = [pair for pair in map(_scores_in_both_orders, documents) if pair is not None]
    outcomes = [outcome for pair in pairs for outcome in pair]
    return {
        "strict_win_rate": average(outcome == 1.0 for outcome in outcomes),
        "tie_rate": average(outcome == 0.5 for outcome in outcomes),
        "loss_rate": average(outcome == 0.0 for outcome in outcomes),
        "order_agreement": average(one == other for one, other in pairs),
        "first_answer_score": average(each for one, other in pairs for each in (one, 1.0 - other)),
        "unparsed": average(verdict is None for each in documents for verdict in each.values()),
    }


def _scores_in_both_orders(verdicts: Verdicts) -> tuple[float, float] | None:
    """The tuned model's score with its answer first, and second."""
    first, second = verdicts[TUNED_FIRST], verdicts[BASE_FIRST]
    return None if first is None or second is None else (VERDICTS[first], 1.0 - VERDICTS[second])


def find_answers(path: Path) -> Path:
    """The language suite's JSON of a run, of a folder of results, or itself."""
    name = f"{SUITE}.json"
    for file in (path / EVALUATION / name, path / name, path):
        if file.is_file():
            return file
    raise UserError(f"{path} has no answers of the language task; {_REMEDY}")


def read_comparison(
    path: Path, model: str, max_tokens: int, prompt: Prompt, limit: int | None, *, is_control: bool
) -> Comparison:
    """A tuned model's answers and those of the base model that its result names.

    Args:
        path: of the tuned model's JSON; in the control also of the base model's.
        max_tokens: of a judgement.
        is_control: whether the base model's answers are compared with themselves.

    Raises:
        UserError: answers that are missing, of the base model itself, or to other prompts than the base model's.
    """
    base_file = base_path(path, read_result(path))
    if base_file is None and not is_control:
        raise UserError(f"{path} is the base model's; name a tuned model's results, or add --control")
    base = _read_answers(base_file or path)
    tuned = base if is_control else _read_answers(path)
    keys = ("doc_id", "doc_hash", "prompt")
    before, after = ([tuple(map(sample.get, keys)) for sample in each.samples] for each in (base, tuned))
    if before != after:
        raise UserError(
            f"{path} and {base_file} answer different prompts ({len(set(before) & set(after))} in common, of {len(after)} and {len(before)}); evaluate both again with the same data, --limit and chat template"
        )
    return Comparison(base, tuned, model, max_tokens, prompt, limit)


def _read_answers(path: Path) -> Answers:
    result = read_result(path)
    if TASK not in result.tasks:
        raise UserError(f"{path} has no answers of the language task; {_REMEDY}")
    samples = sorted(read_samples(path.parent, result.tasks[TASK]), key=lambda sample: sample["doc_id"])
    if not samples or not all(isinstance(sample.get(key), str) for sample in samples for key in ("prompt", "response")):
        raise UserError(f"{path.parent / result.tasks[TASK].samples} has documents without an answer; {_REMEDY}")
    return Answers(path, result, samples)


def write_scores(comparison: Comparison, verdicts: Mapping[int, Verdicts]) -> list[Sample]:
    """Writes the tuned model's scores and the base model's into their results; returns the tuned model's samples with their scores."""
    write_base_scores(comparison)
    scores, tuned = score_documents(verdicts), comparison.tuned
    samples = [
        {**sample, "score": scores.get(sample["doc_id"]), "verdicts": verdicts.get(sample["doc_id"])}
        for sample in tuned.samples
    ]
    definition = (
        f"(W + T/2)/N against the base model, W wins and T ties in N judgements of {comparison.model} with prompt {comparison.prompt.name}: "
        "both orders of each pair, five verdicts folded to win, tie and loss; documents without a verdict in both orders are left out"
    )
    if len(verdicts) < len(samples):
        definition += f"; {len(verdicts)} of {len(samples)} documents"
    _write(tuned, samples, definition, tuned.task.others | summarize(verdicts.values()))
    return samples


def write_base_scores(comparison: Comparison, control: Mapping[str, float | None] | None = None) -> None:
    """Writes the base model's score, 0.5 by definition, into its result.

    Args:
        control: metrics of the base model against itself; None: those that are there stay.
    """
    base = comparison.base
    samples = [{**sample, "score": BASE_SCORE} for sample in base.samples]
    definition = "(W + T/2)/N of the base model against itself, 0.5 by definition"
    if control is not None:
        definition += f"; control by {comparison.model} with prompt {comparison.prompt.name}"
    elif _JUDGED in base.task.definition:
        definition = base.task.definition.partition(_JUDGED)[2]
    others = {f"control_{name}": value for name, value in (control or {}).items()}
    _write(base, samples, definition, base.task.others | others)


def _write(answers: Answers, samples: Sequence[Sample], definition: str, others: dict[str, float | None]) -> None:
    definition = answers_definition(answers.task.definition) + _JUDGED + definition
    task = replace(answers.task, definition=definition, others=others, **scored(samples))
    result = replace(answers.result, tasks={**answers.result.tasks, TASK: task})
    write_result(answers.path.parent, result, {TASK: samples})


def answers_definition(definition: str) -> str:
    """The part of a task's definition that says how the answers were made, without how they were judged."""
    return definition.partition(_JUDGED)[0]
