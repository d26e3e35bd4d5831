from __future__ import annotations

import pytest

from finch.evaluation.tasks.parsers import confidence_of, letter_of


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"),
        (" C\n", "C"),
        ("C.", "C"),
        ("C. Benzene", "C"),
        ("(C)", "C"),
        ("**C**", "C"),
        ("**C.** Benzene", "C"),
        ('"B"', "B"),
        ("B) 2.5", "B"),
        ("B, 85", "B"),
        ("B: the second one", "B"),
        ("Answer: D", "D"),
        ("ANSWER: D", "D"),
        ("Answer: (D)", "D"),
        ("**Answer:** D", "D"),
        ("**Answer: D**", "D"),
        ("Answer:\nD. Water", "D"),
        ("answer: c", "C"),
        ("The answer is (b).", "B"),
        ("The answer is B because A is a solvent.", "B"),
        ("The correct answer is option C.", "C"),
        ("The correct option is D", "D"),
        ("The right choice would be B", "B"),
        ("Final answer: $\\boxed{A}$", "A"),
        ("So we get $\\boxed{\\text{A}}$.", "A"),
        ("I choose B", "B"),
        ("The answer is \u201cB\u201d.", "B"),
        ("A. one\nB. two\nC. three\nD. four\n\nThe answer is B.", "B"),
        ("The answer is A. No, wait: the answer is C.", "C"),
        ("First I think A.\nThen\nD. Water", "D"),
        ("I would say it is B", "B"),
        ("A compound with C-H bonds, so B", "B"),
        ("The answer is not A, it is B", "B"),
        ("Option B is right", "B"),
        ("<think>The answer is A</think>\nC", "C"),
        ("A", "A"),
        ("A. A polymer", "A"),
        ("The answer is a polymer: B", "B"),
    ],
)
def test_letter_is_the_last_stated_one(text: str, letter: str) -> None:
    assert letter_of(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "no idea",
        "A polymer",
        "A small molecule is formed.",
        "E",
        "The answer is E",
        "The answer is E, since A is wrong",
        "CO2 and H2O",
        "C-H bond",
        "Because",
        "It's 42.",
        "the answer is a mixture of water and salt",
        "Answer: Benzene",
        "Answer: Dimethyl ether",
        "abcd",
    ],
)
def test_letter_is_none_where_none_is_stated(text: str) -> None:
    assert letter_of(text) is None


def test_letter_is_one_of_the_options() -> None:
    assert letter_of("F. six", "ABCDEF") == "F"
    assert letter_of("F. six", "ABCD") is None


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("Answer: B\nConfidence: 85", 85),
        ("Answer: B\nConfidence: 85%", 85),
        ("Answer: B\nConfidence: 85/100", 85),
        ("Answer: B\n**Confidence:** 85", 85),
        ("Answer: B\nConfidence: **85**", 85),
        ("Confidence (0-100): 85", 85),
        ("My confidence is 70 percent.", 70),
        ("I am 90% confident that it is C.", 90),
        ("I'm 90 percent sure.", 90),
        ("confidence level of 65", 65),
        ("B, 85", 85),
        ("B 85", 85),
        ("B\n85", 85),
        ("C\n90%", 90),
        ("Confidence: 0.85", 85),
        ("Confidence: 0,85", 85),
        ("Confidence: .5", 50),
        ("Confidence: 1.0", 100),
        ("Confidence: 0.5%", 0.5),
        ("Confidence: 1", 1),
        ("Confidence: 0", 0),
        ("Confidence: 100", 100),
        ("Confidence: 8/10", 80),
        ("Confidence: 9 out of 10", 90),
        ("Confidence: 99.5", 99.5),
        ("Confidence: 40. On reflection, confidence: 60", 60),
        ("In 1990 it was 12. Confidence: 75", 75),
        ("Confidence: 75, since the events of 1990 are well known", 75),
        ("<think>Confidence: 10</think>\nConfidence: 75", 75),
    ],
)
def test_confidence_is_the_last_stated_one(text: str, confidence: float) -> None:
    assert confidence_of(text) == pytest.approx(confidence)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "Answer: B",
        "Confidence: high",
        "Confidence: 150",
        "Confidence: 101%",
        "Confidence: 1,000",
        "Confidence: -5",
        "Confidence: 12/10",
        "1990",
        "C. In 5 years the drug was sold.",
        "B. About 70% of the body is water",
    ],
)
def test_confidence_is_none_out_of_range(text: str) -> None:
    assert confidence_of(text) is None
