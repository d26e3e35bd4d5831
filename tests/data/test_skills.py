"""The rows of twelve skills: what every row has, and that none resembles a row of a benchmark."""

import re
from collections import Counter

import pytest
from helpers.evaluation import read_lines

from finch.data.skills import skill_rows
from finch.probes.kinds import question_of

ROWS = skill_rows()
SKILLS = Counter(row["skill"] for row in ROWS)
WORDS = 8


def test_skills_take_turns():
    assert len(SKILLS) == 12
    assert min(SKILLS.values()) >= 32
    assert [row["skill"] for row in ROWS[:12]] == sorted(SKILLS)
    assert set(Counter(row["skill"] for row in skill_rows(96)).values()) == {8}
    with_choices = Counter(row["skill"] for row in ROWS if "choices" in row)
    assert sum(number >= 12 for number in with_choices.values()) >= 8


def asked(row):
    """The text of the last user's turn, after a check of the row's form."""
    assert row.keys() <= {"skill", "question", "messages", "choices", "answer", "harmful"}
    assert ("question" in row) != ("messages" in row)
    assert ("harmful" in row) == (row["skill"] == "safety")
    if "question" in row:
        return row["question"]
    roles = [turn["role"] for turn in row["messages"]]
    assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
    assert roles[-1] == "user"
    return "\n".join(turn["content"] for turn in row["messages"])


def test_every_row_has_its_form():
    texts = [asked(row) for row in ROWS]
    assert all(text == text.strip() and len(text) > 1 for text in texts)
    assert [text for text, number in Counter(texts).items() if number > 1] == []


def test_choices_are_alike_and_one_is_right():
    right = {skill: Counter() for skill in SKILLS}
    for row in ROWS:
        if "choices" in row:
            choices = row["choices"]
            assert len({*choices}) == 4, row
            assert all(choice == choice.strip() for choice in choices), row
            right[row["skill"]][choices.index(row["answer"])] += 1
            lengths = sorted(map(len, choices))
            # Log-likelihoods are compared by character, which short and long answers would bias.
            assert lengths[-1] <= 1.6 * lengths[0] + 3, row
            if "question" in row:
                assert question_of(row).answer == choices.index(row["answer"])
    for skill, places in right.items():
        assert max(places.values(), default=0) <= 0.5 * places.total(), skill  # no place that is right by habit


def grams(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def texts_of(value):
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in texts_of(each)]


@pytest.mark.parametrize(
    "name", ["tofu", "hellaswag", "mmlu", "ifeval", "truthfulqa", "halueval", "winogrande", "sciknoweval"]
)
def test_no_row_resembles_a_benchmarks(shared_data, name):
    own = {gram: row for row in ROWS for text in texts_of(row) for gram in grams(text)}
    files = list((shared_data / name).rglob("*.jsonl"))
    assert files
    for file in files:
        for row in read_lines(file):
            for text in texts_of(row):
                assert not (shared := grams(text) & own.keys()), (file, [own[gram] for gram in shared])
