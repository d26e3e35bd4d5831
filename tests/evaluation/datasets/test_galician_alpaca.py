"""Instruction rows in 70/5/25 parts, from a file or the hub."""

import pytest
from helpers import rows as rows_helper
from helpers.rows import membership

from finch.evaluation.datasets.galician_alpaca import galician_alpaca_dataset

ROWS = [
    {"instruction": f"the bird {number}", "input": "a tree" if number % 3 else "", "output": f"a river {number}"}
    for number in range(100)
]


@pytest.fixture
def load(tokenizer, write):
    return lambda *rows, **arguments: galician_alpaca_dataset(tokenizer, data_files=write(*rows), **arguments)


def instructions(data):
    return [row["instruction"] for row in data._data]


def test_parts_are_pinned(load):
    pinned = {
        "train": (70, "e205150a769b7ad1"),
        "validation": (5, "6c1204c5f178247a"),
        "test": (25, "776e39887e5682ab"),
    }
    parts = {part: instructions(load(*ROWS, part=part)) for part in pinned}
    assert {part: (len(rows), membership(rows)) for part, rows in parts.items()} == pinned


def test_missing_and_empty_inputs_are_the_same(load):
    rows = [{"instruction": row["instruction"], "output": row["output"]} for row in ROWS]
    empty = [{**row, "input": ""} for row in rows]
    assert instructions(load(*rows, part="test")) == instructions(load(*empty, part="test"))


def test_rows_equal_those_of_rows_dataset(load, tokenizer, write):
    data, reference = load(*ROWS, part="all"), rows_helper.load(tokenizer, write(*ROWS))
    assert [data[index] for index in range(100)] == [reference[index] for index in range(100)]
