from __future__ import annotations

import pytest

from finch.evaluation.tasks.parsers import confidence_of, letter_of


@pytest.mark.parametrize(
    ("letter", "texts"),
    [
        ("C", ("C", " C\n", "C.", "C. Benzene", "(C)", "**C**", "**C.** Benzene")),
        ("B", ('"B"', "B) 2.5", "B, 85", "B: the second one", "The answer is \u201cB\u201d.")),
        ("D", ("Answer: D", "ANSWER: D", "Answer: (D)", "**Answer:** D", "**Answer: D**", "Answer:\nD. Water")),
        ("B", ("The answer is (b).", "The right choice would be B", "I choose B", "I would say it is B")),
        ("D", ("The correct option is D", "First I think A.\nThen\nD. Water")),
        ("A", ("A", "A. A polymer", "Final answer: $\\boxed{A}$", "So we get $\\boxed{\\text{A}}$.")),
        ("C", ("answer: c", "The correct answer is option C.", "The answer is A. No, wait: the answer is C.")),
        ("B", ("The answer is B because A is a solvent.", "The answer is not A, it is B", "Option B is right")),
        ("B", ("A. one\nB. two\nC. three\nD. four\n\nThe answer is B.", "A compound with C-H bonds, so B")),
        ("B", ("<think>The answer is A</think>\nB", "The answer is a polymer: B")),
        ("B", ("Answer: I think it is B.", "Answer: I would say B.", "the answer is: 'B'", "(b)", "b) text", "b")),
        (
            "C",
            ("The correct answer is C. Answer A is incorrect because", "Correct answer: C\nIncorrect answers: A, B, D"),
        ),
        (
            "C",
            (
                "The answer is C because the answer A assumes an ideal gas.",
                "**C is correct.** Options A, B and D are wrong.",
            ),
        ),
        ("C", ("C is the correct answer because D has a lower value.", "The answer is C; A is not correct")),
        ("B", ("B) text\n\nExplanation:\nA. wrong\nC. wrong\nD. wrong", "A. one\n\nB. two\n\nC. three\n\nB")),
        ("A", ("The answer is A because it binds.", "Answer: A since B is a salt.", "answer A")),
        (
            "A",
            (
                "The answer is A for the following reasons",
                "Answer: A is the only option that fits",
                "answer is A if dry",
            ),
        ),
        (
            "B",
            (
                "The answer is B. If pressure were constant, then A would be correct.",
                "Answer: B\n\nWhy A is correct in part",
            ),
        ),
        (
            "C",
            (
                "The answer is C.\nIt is often thought that B is correct, but it is not.",
                "The answer is" + " " * 9999 + "C",
            ),
        ),
    ],
)
def test_letter_is_the_last_stated_one(letter: str, texts: tuple[str, ...]) -> None:
    assert {text: letter_of(text) for text in texts} == dict.fromkeys(texts, letter)


@pytest.mark.parametrize(
    "texts",
    [
        ("", "   ", "no idea", "Because", "It's 42.", "abcd"),
        (
            "A polymer",
            "A small molecule is formed.",
            "the answer is a mixture of water and salt",
            "Answer: A covalent bond",
        ),
        ("<think>Answer A looks right. So the answer is A",),
        ("E", "The answer is E", "The answer is E, since A is wrong"),
        ("CO2 and H2O", "C-H bond", "Answer: Benzene", "Answer: Dimethyl ether"),
    ],
    ids=["no letter", "article", "cut off", "no option", "part of a word"],
)
def test_letter_is_none_where_none_is_stated(texts: tuple[str, ...]) -> None:
    assert {text: letter_of(text) for text in texts} == dict.fromkeys(texts)


def test_letter_is_one_of_the_options() -> None:
    assert letter_of("F. six", "ABCDEF") == "F"
    assert letter_of("F. six", "ABCD") is None


@pytest.mark.parametrize(
    ("confidence", "texts"),
    [
        (85, ("Answer: B\nConfidence: 85", "Answer: B\nConfidence: 85%", "Answer: B\nConfidence: 85/100")),
        (85, ("Answer: B\n**Confidence:** 85", "Answer: B\nConfidence: **85**", "Confidence (0-100): 85")),
        (85, ("B, 85", "B 85", "B\n85", "Confidence: 0.85", "Confidence: 0,85")),
        (90, ("I am 90% confident that it is C.", "I'm 90 percent sure.", "C\n90%", "Confidence: 9 out of 10")),
        (70, ("My confidence is 70 percent.", "confidence level of 70", "Confidence: 7/10")),
        (75, ("In 1990 it was 12. Confidence: 75", "Confidence: 75, since the events of 1990 are well known")),
        (75, ("Confidence: 40. On reflection, confidence: 75", "<think>Confidence: 10</think>\nConfidence: 75")),
        (50, ("Confidence: .5",)),
        (85, ("Confidence: 85. I am confident because of 3 sources", "Confidence - 85", "B (85)", "Answer: B, 85")),
        (
            85,
            (
                "Confidence: 85\nI am very confident, since in 1969 it was.",
                "I am 85% confident that it is B (option 2).",
            ),
        ),
        (
            95,
            (
                "Confidence level between 0 and 100: 95",
                "Confidence: on a scale from 0 to 100, 95",
                "0-100 confidence: 95",
            ),
        ),
        (100, ("Confidence: 1.0", "Confidence: 100")),
        (0.5, ("Confidence: 0.5%",)),
        (1, ("Confidence: 1",)),
        (0, ("Confidence: 0",)),
        (99.5, ("Confidence: 99.5",)),
    ],
)
def test_confidence_is_the_last_stated_one(confidence: float, texts: tuple[str, ...]) -> None:
    assert {text: confidence_of(text) for text in texts} == pytest.approx(dict.fromkeys(texts, confidence))


@pytest.mark.parametrize(
    "texts",
    [
        ("", "B", "Answer: B", "Confidence: high", "1990"),
        ("C. In 5 years the drug was sold.", "B. About 70% of the body is water"),
        ("Confidence: 150", "Confidence: 101%", "Confidence: 1,000", "Confidence: -5", "Confidence: 12/10"),
    ],
    ids=["none", "in a sentence", "out of range"],
)
def test_confidence_is_none_where_none_is_stated(texts: tuple[str, ...]) -> None:
    assert {text: confidence_of(text) for text in texts} == dict.fromkeys(texts)
