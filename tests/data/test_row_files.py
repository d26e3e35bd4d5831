"""Splits by content: the same rows for everybody, exact sizes, and equal prompts on one side."""

import random

import pytest

from finch.data.row_files import PARTS, part_indices
from finch.errors import UserError

SHARES = {"validation_fraction": 0.05, "test_fraction": 0.25, "seed": 0}
ROWS = [(f"question {number}", f"answer {number}") for number in range(200)]


def parts(rows, **changes):
    """The rows of each part."""
    arguments = SHARES | changes
    return {name: [rows[index] for index in part_indices(rows, name, **arguments)] for name in PARTS[1:]}


def test_parts_are_disjoint_complete_and_of_exact_sizes():
    split = parts(ROWS)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 140, "validation": 10, "test": 50}
    assert sorted(row for rows in split.values() for row in rows) == sorted(ROWS)


def test_parts_do_not_depend_on_the_order_of_rows():
    assert parts(random.Random(0).sample(ROWS, len(ROWS))) == parts(ROWS)
    assert parts(ROWS, seed=1)["test"] != parts(ROWS)["test"]


def test_equal_prompts_stay_in_one_part():
    rows = [(f"question {number // 4}", f"answer {number}") for number in range(200)]
    shuffled = random.Random(1).sample(rows, len(rows))
    split = parts(shuffled)
    prompts = {name: {prompt for prompt, _ in part} for name, part in split.items()}
    assert sum(map(len, prompts.values())) == 50
    assert [len(split[name]) for name in ("test", "validation", "train")] == [52, 8, 140]  # 50 is not a multiple of 4
    assert split == parts(rows)


def test_fields_without_a_value_do_not_count():
    bare = [({"text": prompt, "labels": [1]}, rest) for prompt, rest in ROWS]
    padded = [({"labels": [1], "text": prompt, "name": None}, rest) for prompt, rest in ROWS]
    assert part_indices(bare, "test", **SHARES) == part_indices(padded, "test", **SHARES)


@pytest.mark.parametrize(
    ("rows", "part", "changes", "message"),
    [
        (ROWS, "train", {"validation_fraction": 1.0}, r"validation_fraction=1.0 must lie in \[0, 1\)"),
        (ROWS, "train", {"test_fraction": -0.1}, r"test_fraction=-0.1 must lie in \[0, 1\)"),
        (ROWS, "train", {"test_fraction": 0.95}, "leave no rows to train on; their sum must be below 1"),
        (ROWS, "test", {"test_fraction": 0}, "part=test is empty with dataset.test_fraction=0"),
        (ROWS[:9], "train", {}, "of 9 rows none is left for part=validation with validation_fraction=0.05"),
        ([("same", 1)] * 20, "train", {}, r"none is left for part=validation .*equal prompts stay together"),
        ([], "train", {}, "of 0 rows none is left"),
    ],
)
def test_bad_splits_raise(rows, part, changes, message):
    with pytest.raises(UserError, match=message) as raised:
        part_indices(rows, part, **(SHARES | changes))
    assert "\n" not in str(raised.value)
