"""Rows of multiple-choice questions in the fields that public data sets have."""

import pytest

from finch.base.errors import UserError
from finch.probes.kinds import Question, is_multiple_choice, question_of

CHOICES = ["one", "two", "three"]
RIGHT = Question("q", ("one", "two", "three"), 1, True)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "choices": CHOICES, "answer": 1}, RIGHT),
        ({"question": " q ", "options": CHOICES, "answer": "B"}, RIGHT),
        ({"question": "q", "choices": CHOICES, "answer": "two", "subject": "x"}, RIGHT),
        ({"question": "q", "choices": {"text": CHOICES, "label": ["P", "Q", "R"]}, "answerKey": "Q"}, RIGHT),
        ({"question": "q", "choices": {"text": ["2", "1", "0"], "label": ["1", "2", "3"]}, "answerKey": "2"}, Question("q", ("2", "1", "0"), 1, True)),
        ({"ctx": "c", "endings": CHOICES, "label": "1"}, Question("c", RIGHT.choices, 1, False)),
        ({"activity_label": "A", "ctx": "c", "endings": CHOICES, "label": 0}, Question("A: c", RIGHT.choices, 0, False)),
        ({"prompt": "c", "choices": CHOICES, "label": 2}, Question("c", RIGHT.choices, 2, False)),
        (
            {"question": "q", "answer": "a", "paraphrased_question": "p", "paraphrased_answer": "one", "perturbed_answer": ["two", "three"]},
            Question("p", RIGHT.choices, 0, True),
        ),
    ],
)  # fmt: skip
def test_question_of_known_fields(row, expected):
    assert is_multiple_choice(row)
    assert question_of(row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, "it has the fields question, answer; a multiple-choice row has"),
        ({"question": "q", "choices": ["one"], "answer": 0}, "its field 'choices' is not a list of at least two texts"),
        ({"question": "q", "choices": CHOICES, "answer": 3}, "its field 'answer' is '3', which names none of the 3 choices"),
        ({"question": "q", "choices": CHOICES, "answer": True}, "which names none of the 3 choices"),
        ({"question": "", "choices": CHOICES, "answer": 0}, "its field 'question' is not text"),
        ({"question": "q", "choices": ["one", 2], "answer": 0}, "its field 'choices' is not text"),
    ],
)  # fmt: skip
def test_question_of_bad_rows_raises(row, message):
    with pytest.raises(UserError, match=message):
        question_of(row)
