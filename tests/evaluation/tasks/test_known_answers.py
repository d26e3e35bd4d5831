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


@pytest.mark.parametrize(
    ("name", "model", "bound"),
    [
        (
            "sciknoweval",
            KnownAnswerModel(respond=lambda document: "C"),
            1.96,
        ),  # the rows' own letters are about uniform
        ("halueval", KnownAnswerModel(lambda document: 1), 0),
        ("halueval", KnownAnswerModel(), 0),
    ],
)
def test_fixed_letter_scores_chance(name: str, model: KnownAnswerModel, bound: float, shared_data: Path) -> None:
    samples, chance = evaluate(TASKS[name], model, shared_data), TASKS[name].chance
    assert chance is not None
    assert abs(score(samples) - chance) <= bound * math.sqrt(chance * (1 - chance) / len(samples))


def test_confidence_of_a_guess_scores_chance(shared_data: Path) -> None:
    """A guess with its true confidence: (1 - .25)^2 where the first of the shuffled options is right, else .25^2."""
    model = KnownAnswerModel(respond=lambda document: "Answer: A\nConfidence: 25")
    brier = score(evaluate(TASKS["confidence"], model, shared_data))
    share = (brier - 0.25**2) / (0.75**2 - 0.25**2)
    assert share == pytest.approx(1 / 4, abs=1.96 * math.sqrt(1 / 4 * 3 / 4 / 690))
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
