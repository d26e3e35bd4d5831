"""Instruction rows in 70/5/25 parts, from a file or the hub."""

import pytest
from helpers.rows import load as load_rows
from helpers.rows import membership, write_lines
from helpers.runs import make_config
from omegaconf import OmegaConf
from torchtune.config import instantiate

from finch.data.galician_alpaca import galician_alpaca_dataset
from finch.errors import UserError

ROWS = [
    {"instruction": f"the bird {number}", "input": "a tree" if number % 3 else "", "output": f"a river {number}"}
    for number in range(100)
]


@pytest.fixture
def tokenizer(base_folder, rows_file, tmp_path):
    return instantiate(OmegaConf.create(make_config(base_folder, rows_file, tmp_path)).tokenizer)


def load(tokenizer, folder, rows=ROWS, **arguments):
    return galician_alpaca_dataset(tokenizer, data_files=write_lines(folder / "rows.jsonl", *rows), **arguments)


def instructions(data):
    return [row["instruction"] for row in data._data]


def test_parts_are_pinned_whatever_the_order(tokenizer, tmp_path):
    parts = {part: instructions(load(tokenizer, tmp_path, part=part)) for part in ("train", "validation", "test")}
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 70, "validation": 5, "test": 25}
    pinned = {"train": "e205150a769b7ad1", "validation": "6c1204c5f178247a", "test": "776e39887e5682ab"}
    assert {part: membership(rows) for part, rows in parts.items()} == pinned
    turned = {part: instructions(load(tokenizer, tmp_path, ROWS[::-1], part=part)) for part in parts}
    assert turned == parts


def test_missing_and_empty_inputs_are_the_same(tokenizer, tmp_path):
    rows = [{key: value for key, value in row.items() if key != "input"} for row in ROWS]
    test = instructions(load(tokenizer, tmp_path, rows, part="test"))
    assert test == instructions(load(tokenizer, tmp_path, [{**row, "input": ""} for row in rows], part="test"))


def test_rows_equal_those_of_rows_dataset(tokenizer, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", *ROWS)
    data, reference = galician_alpaca_dataset(tokenizer, data_files=file, part="all"), load_rows(tokenizer, file)
    assert [data[index] for index in range(100)] == [reference[index] for index in range(100)]


def test_invalid_arguments_raise(tokenizer, tmp_path):
    with pytest.raises(UserError, match="format=instruction, but the rows look like question/answer"):
        load(tokenizer, tmp_path, [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match="part=dev must be all, train, validation or test"):
        load(tokenizer, tmp_path, part="dev")
