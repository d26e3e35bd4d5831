"""A model whose answers are known has the score 1 or chance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.known_answer_model import KnownAnswerModel, evaluate, score
from helpers.punkt import add_punkt_tab
from helpers.rows import write_lines

from finch.evaluation.tasks.registry import TASKS

OWN = ("tofu", "tofu_validation", "sciknoweval", "sciknoweval_120", "sciknoweval_validation", "halueval")


def right_choice(document: dict[str, Any]) -> int:
    return int(document["gold"])


def right_response(document: dict[str, Any]) -> str:
    return f"{document['choices'][document['gold']]}. It is." if "choices" in document else ""


def within_95(share: float, chance: float, n: int) -> bool:
    return abs(share - chance) <= 1.96 * math.sqrt(chance * (1 - chance) / n)


@pytest.mark.parametrize(
    ("name", "has_chat_template"), [*((name, True) for name in OWN), ("tofu", False), ("sciknoweval", False)]
)
def test_model_with_the_right_answer_scores_one(name: str, has_chat_template: bool, shared_data: Path) -> None:
    model = KnownAnswerModel(right_choice, right_response)
    samples = evaluate(TASKS[name], model, shared_data, has_chat_template=has_chat_template, limit=30)
    assert score(samples) == 1
    others = TASKS[name].others(samples)
    for metric in others.keys() - {"pick_longer", "acc_norm_seen", "acc_norm_unseen"}:
        assert others[metric] == 1, metric


def test_sciknoweval_fixed_letter_scores_chance(shared_data: Path) -> None:
    """The rows' own letters are about uniform; a model that always says C is right in a quarter of them."""
    samples = evaluate(TASKS["sciknoweval"], KnownAnswerModel(respond=lambda document: "C"), shared_data)
    assert within_95(score(samples), 1 / 4, len(samples))
    letters = TASKS["sciknoweval"].others(samples)["acc_letters"]  # equally likely: A
    assert letters is not None
    assert within_95(letters, 1 / 4, len(samples))


@pytest.mark.parametrize("letter", [1, None])
def test_halueval_fixed_letter_scores_exactly_half(letter: int | None, shared_data: Path) -> None:
    samples = evaluate(TASKS["halueval"], KnownAnswerModel(lambda document: letter), shared_data)
    assert len(samples) == 600
    assert score(samples) == 1 / 2


def test_confidence_of_a_guess_scores_chance(shared_data: Path) -> None:
    """A guess with its true confidence: (1 - .25)^2 where the first of the shuffled options is right, else .25^2."""
    model = KnownAnswerModel(respond=lambda document: "Answer: A\nConfidence: 25")
    brier = score(evaluate(TASKS["confidence"], model, shared_data))
    assert within_95((brier - 0.25**2) / (0.75**2 - 0.25**2), 1 / 4, 690)
    assert TASKS["confidence"].chance == 0.25 * 0.75**2 + 0.75 * 0.25**2


def test_ifeval_counts_followed_instructions(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_punkt_tab(tmp_path, monkeypatch)
    root = tmp_path / "data"
    (root / "ifeval").mkdir(parents=True)
    one, two = ["punctuation:no_comma"], ["punctuation:no_comma", "change_case:english_capital"]
    write_lines(
        root / "ifeval" / "prompts.jsonl",
        {"key": 1, "prompt": "No commas.", "instruction_id_list": one, "kwargs": [{}]},
        {"key": 2, "prompt": "No commas, capitals.", "instruction_id_list": two, "kwargs": [{}, {}]},
    )
    model = KnownAnswerModel(respond=lambda document: "This is an English sentence without a comma")
    samples = evaluate(TASKS["ifeval"], model, root)
    assert [sample["score"] for sample in samples] == [1, 0]
    others = TASKS["ifeval"].others(samples)
    assert others == {
        "prompt_level_loose_acc": 1 / 2,
        "inst_level_strict_acc": 2 / 3,
        "inst_level_loose_acc": 2 / 3,
        "response_words": 8,
    }
