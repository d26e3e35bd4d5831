"""Scores and further metrics, from the samples and the rows by a few independent lines."""

from __future__ import annotations

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from helpers.known_answer_model import KnownAnswerModel, evaluate, score
from helpers.punkt import add_punkt_tab
from lm_eval.api.instance import Instance

from finch.evaluation.datasets.sciknoweval import prompt_of
from finch.evaluation.results import Sample
from finch.evaluation.tasks.registry import TASKS

STATED: dict[str, tuple[str | None, float | None]] = {
    "Answer: A\nConfidence: 90": ("A", 0.9),
    "Answer: B\nConfidence: 0.35": ("B", 0.35),
    "C\n60%": ("C", 0.6),
    "The answer is D.": ("D", None),
    "no idea": (None, None),
    "B, 100": ("B", 1.0),
}
"""Response to its letter and its confidence."""
RESPONSES = list(STATED)


def number_of(*texts: str) -> int:
    return zlib.crc32("\n".join(texts).encode())


def likelihood(context: str, continuation: str) -> float:
    """Of a model that knows nothing."""
    return -0.01 - len(continuation) * (number_of(context, continuation) % 1000) / 500


class Guesser(KnownAnswerModel):
    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        return [(likelihood(*request.args), False) for request in requests]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        return [RESPONSES[number_of(request.args[0]) % len(RESPONSES)] for request in requests]


@lru_cache
def samples_of(name: str, data_root: Path, limit: int | None = 60) -> list[Sample]:
    return evaluate(TASKS[name], Guesser(), data_root, limit=limit)


def rows_of(name: str, data_root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_root / TASKS[name].sources[0].file).read_text().splitlines()]


def likeliest(values: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    per_character = [value / length for value, length in zip(values, lengths or [1] * len(values), strict=True)]
    return max(range(len(values)), key=per_character.__getitem__)


def average(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["tofu", "hellaswag", "winogrande", "halueval", "sciknoweval", "confidence"])
def test_samples_are_json_and_sorted(name: str, shared_data: Path) -> None:
    samples = samples_of(name, shared_data)
    assert json.loads(json.dumps(samples, allow_nan=False)) == samples
    assert [sample["doc_id"] for sample in samples] == list(range(60))
    assert len({sample["doc_hash"] for sample in samples}) == 60


def test_hellaswag_score_is_per_character(shared_data: Path) -> None:
    samples, rows = samples_of("hellaswag", shared_data), rows_of("hellaswag", shared_data)
    assert score(samples) == average(
        likeliest(sample["loglikelihoods"], [len(ending) for ending in row["endings"]]) == row["label"]
        for sample, row in zip(samples, rows, strict=False)
    )
    acc = average(likeliest(sample["loglikelihoods"]) == sample["answer"] for sample in samples)
    assert TASKS["hellaswag"].others(samples) == {"acc": acc}
    assert 0 < acc < 1


def test_winogrande_score_is_the_likelier_option(shared_data: Path) -> None:
    samples, rows = samples_of("winogrande", shared_data), rows_of("winogrande", shared_data)
    assert score(samples) == average(
        likeliest(sample["loglikelihoods"]) == int(row["answer"]) - 1
        for sample, row in zip(samples, rows, strict=False)
    )
    before, after = rows[0]["sentence"].split("_")
    assert samples[0]["loglikelihoods"] == [
        likelihood(before + rows[0][option], f" {after.strip()}") for option in ("option1", "option2")
    ]
    assert TASKS["winogrande"].others(samples) == {}


def test_mmlu_score_is_the_mean_over_documents(shared_data: Path) -> None:
    samples, rows = samples_of("mmlu", shared_data, 3), rows_of("mmlu", shared_data)
    by_subject = defaultdict(list)
    for row in rows:
        by_subject[row["subject"]].append(row["answer"])
    correct = defaultdict(list)
    for sample in samples:
        subject, number = sample["doc_id"].split("/")
        correct[subject].append(likeliest(sample["loglikelihoods"]) == by_subject[subject][int(number)])
    assert len(correct) == 57
    assert score(samples) == average(value for values in correct.values() for value in values)
    unequal = [sample for sample in samples if sample["doc_id"] not in ("anatomy/1", "anatomy/2")]
    correct["anatomy"] = correct["anatomy"][:1]
    assert TASKS["mmlu"].others(unequal)["acc_subjects"] == pytest.approx(average(map(average, correct.values())))
    assert TASKS["mmlu"].others(unequal)["acc_subjects"] != score(unequal)


def test_ifeval_makes_no_random_choices(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_punkt_tab(tmp_path, monkeypatch)
    samples = samples_of("ifeval", shared_data, 30)
    assert evaluate(TASKS["ifeval"], Guesser(), shared_data, limit=30) == samples


def test_truthfulqa_score_is_the_probability_of_true_answers(shared_data: Path) -> None:
    samples, rows = samples_of("truthfulqa", shared_data), rows_of("truthfulqa", shared_data)
    for sample, row in zip(samples, rows, strict=False):
        labels = list(row["mc2_targets"].values())
        mass = [math.exp(value) for value in sample["loglikelihoods"]]
        true = sum(share for share, label in zip(mass, labels, strict=True) if label)
        assert sample["score"] == pytest.approx(true / sum(mass))
    others = TASKS["truthfulqa"].others(samples)
    assert others["mc1"] == average(likeliest(sample["mc1_loglikelihoods"]) == 0 for sample in samples)
    shares = [average(row["mc2_targets"].values()) for row in rows[:60]]
    assert others["mc2_uniform"] == pytest.approx(average(shares))


def test_tofu_score_is_per_character(shared_data: Path) -> None:
    samples, rows = samples_of("tofu", shared_data), rows_of("tofu", shared_data)
    correct, acc, letters = [], [], []
    for sample, row in zip(samples, rows, strict=False):
        answers = [row["paraphrased_answer"], *row["perturbed_answer"]]
        context = f"<user>{row['paraphrased_question']}</user><assistant>"
        values = [likelihood(context, answer) for answer in answers]
        assert sorted(values) == sorted(sample["loglikelihoods"])
        assert sample["loglikelihoods"][sample["answer"]] == values[0]
        correct.append(likeliest(values, [len(answer) for answer in answers]) == 0)
        acc.append(likeliest(values) == 0)
        letters.append(likeliest(sample["letter_loglikelihoods"]) == sample["answer"])
    assert score(samples) == average(correct)
    assert TASKS["tofu"].others(samples) == {
        "acc": average(acc),
        "acc_letters": average(letters),
        "acc_norm_seen": None,
        "acc_norm_unseen": None,
    }


def test_sciknoweval_score_is_the_stated_letter(shared_data: Path) -> None:
    samples = samples_of("sciknoweval", shared_data)
    keys = {prompt_of(row): row["answerKey"] for row in rows_of("sciknoweval", shared_data)}
    assert score(samples) == average(STATED[sample["response"]][0] == keys[sample["prompt"]] for sample in samples)
    letters = ["ABCD"[likeliest(sample["letter_loglikelihoods"])] for sample in samples]
    assert TASKS["sciknoweval"].others(samples) == {
        "parse_rate": average(sample["response"] != "no idea" for sample in samples),
        "acc_letters": average(letter == sample["answer"] for letter, sample in zip(letters, samples, strict=True)),
    }


def test_halueval_score_is_the_mean_of_questions(shared_data: Path) -> None:
    samples, rows = samples_of("halueval", shared_data), rows_of("halueval", shared_data)
    by_question = defaultdict(list)
    for sample in samples:
        by_question[sample["cluster"]].append(likeliest(sample["loglikelihoods"]) == sample["answer"])
    assert [len(pair) for pair in by_question.values()] == [2] * 30
    assert score(samples) == pytest.approx(average(map(average, by_question.values())))
    longer = [len(row["hallucinated_answer"]) - len(row["right_answer"]) for row in rows[:30]]
    expected = average(0.5 if difference == 0 else float(difference > 0) for difference in longer)
    assert TASKS["halueval"].others(samples) == {"pick_longer": pytest.approx(expected)}


def test_confidence_metrics_are_of_parsed_responses(shared_data: Path) -> None:
    samples = samples_of("confidence", shared_data, 200)
    answers = [(*STATED[sample["response"]], sample["answer"]) for sample in samples]
    parsed = [(stated, letter == right) for letter, stated, right in answers if stated is not None]
    errors = [(confidence - is_right) ** 2 for confidence, is_right in parsed]
    assert score(samples) == pytest.approx(average(errors))
    ece = 0.0
    for confidence in {confidence for confidence, _ in parsed}:  # each in a separate bin, but for .9 and 1.0
        of_bin = [is_right for value, is_right in parsed if value == confidence]
        ece += len(of_bin) / len(parsed) * abs(confidence - average(of_bin))
    assert TASKS["confidence"].others(samples) == {
        "parse_rate": len(parsed) / 200,
        "acc": average(is_right for _, is_right in parsed),
        "ece": pytest.approx(ece),
        "brier_worst_case": pytest.approx((sum(errors) + 200 - len(parsed)) / 200),
    }
    assert 0 < len(parsed) < 200


def test_no_parsed_response_has_no_brier_score(shared_data: Path) -> None:
    samples = evaluate(TASKS["confidence"], KnownAnswerModel(respond=lambda document: "no idea"), shared_data, limit=5)
    assert [sample["score"] for sample in samples] == [None] * 5
    assert TASKS["confidence"].others(samples) == {"parse_rate": 0, "acc": None, "ece": None, "brier_worst_case": 1}
