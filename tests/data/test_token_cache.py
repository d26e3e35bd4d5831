"""Tokenized rows in a file: made once, mapped afterwards, made again where the file is damaged, kept in memory where there is no room."""

import os
from collections import Counter

import datasets
import pytest

from finch.base.errors import UserError
from finch.data import cache as file_cache
from finch.data.token_cache import TokenizedRow, tokenized_rows

ROWS = [
    TokenizedRow([1, 2, 3, 4], [-100, 2, -100, 4], None, ["id"], True),
    TokenizedRow(error="its field 'answer' is missing", unused=["id", "messages[].name"]),
    TokenizedRow([5, 6], [-100, -100]),
    TokenizedRow([7], [7]),
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "finch"


@pytest.fixture
def make():
    """The rows, and how often they were tokenized."""
    calls = []

    def batches(size):
        calls.append(size)
        yield ROWS[:3]
        yield ROWS[3:]

    def make_rows(*settings):
        return tokenized_rows(batches, len(ROWS), settings or ["a"], "dataset"), len(calls)

    return make_rows


def check(rows):
    assert [rows[index] for index in (0, 2, 3)] == [
        {"tokens": list(row.tokens), "labels": list(row.labels)} for row in (ROWS[0], *ROWS[2:])
    ]
    with pytest.raises(UserError, match="its field 'answer' is missing"):
        rows[1]
    assert [rows.is_empty(index) for index in range(4)] == [True, False, False, False]
    assert rows.unused() == Counter({"id": 2, "messages[].name": 1})
    assert rows.most_answers() == 0


def test_rows_are_made_once_for_equal_settings(cache, make):
    for expected in (1, 1):
        rows, number = make()
        check(rows)
        assert number == expected
    assert make("b")[1] == 2
    assert len(list(cache.glob("*.arrow"))) == 2


def test_a_damaged_or_foreign_file_is_made_again(cache, make):
    make()
    [file] = cache.glob("*.arrow")
    content = file.read_bytes()
    flipped = bytes([*content[:-40], content[-40] ^ 1, *content[-39:]])
    for number, damaged in enumerate((flipped, content[: len(content) // 2], b"", b"another"), start=2):
        file.write_bytes(damaged)
        rows, calls = make()
        check(rows)
        assert calls == number
        assert file.read_bytes() == content


@pytest.mark.parametrize("name", ["file", "partial", "lock"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_removed_or_said(name, kind, cache, make, caplog):
    """And nothing waits for the other end of a pipe."""
    make()
    [file], [lock] = cache.glob("*.arrow"), cache.glob("*.lock")
    place = {"file": file, "lock": lock, "partial": lock.with_suffix(".partial")}[name]
    file.unlink()
    lock.unlink(missing_ok=True)
    make_it = {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir, "loop": lambda: place.symlink_to(place.name)}
    make_it[kind]()
    file_cache._warn.cache_clear()
    rows, _ = make()
    check(rows)
    is_healed = kind == "pipe" or (kind == "loop" and name != "lock")
    assert caplog.text.count("rows cannot be kept in") == (not is_healed)
    assert (make()[1] == 2) == is_healed


def test_rows_stay_in_memory_where_there_is_no_room(cache, make, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_cache, "_write", full)
    rows, _ = make()
    check(rows)
    assert "No space left on device" in caplog.text
    assert "HF_DATASETS_CACHE names another folder" in caplog.text
