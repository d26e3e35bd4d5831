"""Rows as their files have them; splits by content: the same rows for everybody, exact sizes, and equal prompts on one side."""

import csv
import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from finch.base.errors import UserError
from finch.data import row_files
from finch.data.formats import detect
from finch.data.prompts import load_rows
from finch.data.row_files import PARTS, local_files, part_indices, read_rows, source_of
from finch.data.rows import load_table

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


# Files

DATES = [
    {"question": "when?", "answer": "2024-06-01T00:30:00+02:00", "id": 10**25},
    {"question": "q", "answer": "5.50"},
]
MIXED = [*DATES, {"question": "text", "answer": [{"type": "text", "text": "parts"}]}, {"question": "", "answer": None}]
NUMBERS = [{"question": "q", "answer": 5.50}, {"question": "\u00e9", "answer": True, "other": {"a": [None]}}]


def lines(rows, end="\n"):
    return "".join(json.dumps(row) + end for row in rows)


def table_of(*files, split="train"):
    names = [str(file) for file in files]
    return list(load_table(source_of(files), names, local_files(names), name=None, split=split))


def test_json_values_are_those_of_the_file_in_every_file(tmp_path):
    """No file and no row gives another a type: dates stay text, numbers numbers, of any size."""
    one, two, three = (tmp_path / name for name in ("one.jsonl", "two.JSON", "three.jsonl.GZ"))
    one.write_bytes(b"\xef\xbb\xbf" + lines(DATES, "\r\n\n").encode())
    two.write_text(json.dumps(MIXED, indent=1))
    three.write_bytes(gzip.compress(lines(NUMBERS).encode()))
    assert table_of(one, two, three) == [*DATES, *MIXED, *NUMBERS]
    assert [row for file in (one, two, three) for row in read_rows(file, "json")] == [*DATES, *MIXED, *NUMBERS]
    assert table_of(one, two, three, split="train[1:4]") == [*DATES, *MIXED, *NUMBERS][1:4]
    assert load_rows([str(one), str(two)], None, None, "train", 3) == [*DATES, MIXED[0]]
    two.write_text(lines(NUMBERS))  # read again, not taken from the cache
    assert table_of(two) == NUMBERS


def test_csv_cells_are_those_of_the_file(tmp_path):
    cells = [["2024-01-12", "NA"], ["5.50", "a" * 200_000], ["None", ""], ["x, y", 'two\nlines "quoted"']]
    text = io.StringIO()
    csv.writer(text).writerows([["", "question", "answer"], *([number, *row] for number, row in enumerate(cells))])
    file = tmp_path / "pandas.csv"
    file.write_text("\ufeff" + text.getvalue(), newline="")
    assert table_of(file) == [{"question": one, "answer": two or None} for one, two in cells]
    assert detect(str(file)).columns == {"question": "question", "answer": "answer"}


def test_a_file_counts_once_by_whatever_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(lines([{"question": "a", "answer": "b"}]))
    for names in (["a.jsonl", "a.jsonl"], ["a.jsonl", str(tmp_path / "a.jsonl")], ["a.jsonl", "*.jsonl"]):
        with pytest.raises(UserError, match=r"a\.jsonl more than once, whose rows would count as often; name it once"):
            local_files(names)


@pytest.mark.parametrize("name", ["a[1].jsonl", "what?.csv", "*.jsonl", "{a},b c=$d.jsonl", "a[1] {x},*?.parquet"])
def test_a_named_file_is_the_file_that_is_read(tmp_path, name):
    rows = [{"question": "a", "answer": "b"}]
    for each, content in ((name, rows), (f"b{name}", [{"question": "other", "answer": "other"}])):
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pa.Table.from_pylist(content), tmp_path / each)
        elif name.endswith(".csv"):
            (tmp_path / each).write_text("question,answer\n" + ",".join(content[0].values()))
        else:
            (tmp_path / each).write_text(lines(content))
    assert table_of(tmp_path / name) == rows
    assert load_rows(str(tmp_path / name), None, None, "train", 1) == rows
    assert detect(str(tmp_path / name)).num_rows == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question,answer\nq,\u00e9t\u00e9\n".encode("cp1252"), "is not UTF-8 .byte 0xe9., perhaps cp1252"),
        (
            "a.csv",
            "question,answer\nq,a\n".encode("utf-16"),
            "is not UTF-8 .its first bytes are UTF-16's., perhaps UTF-16",
        ),
        (
            "a.jsonl",
            lines(DATES).encode("utf-16-be"),
            "perhaps UTF-16BE; write it as UTF-8: iconv -f UTF-16BE -t UTF-8",
        ),
        ("a.csv", b"answer,question,answer\na,q,a\n", "its header has the column 'answer' twice"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "a": 2}\n', "row 2 is not JSON .it has the field 'a' twice."),
        ("a.json", b'[{"a": 1}, {"a": "\\ud83d"}]', r"row 2 has '.*', half of a character"),
        ("a.jsonl", b'{"a": "\\ud83d\\udc26"}\n{"a": "\\udc26"}\n', r"row 2 has '.*', half of a character"),
        ("a.csv", b"question,answer\nq,a,b\n", "row 1 has more fields than the header"),
    ],
)
def test_what_cannot_be_read_as_it_is_meant_is_named(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        table_of(file)
    assert str(file) in str(error.value)


SMALL, LARGE = "a" * 9, "a" * (1 << 20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", lines([{"a": SMALL}, {"a": LARGE}]), "row 2 has 1 MiB or more; split or remove that row"),
        ("a.jsonl.gz", LARGE, "row 1 has 1 MiB or more"),
        ("a.json.gz", f'["{LARGE}", 1]', "is a JSON array of more than 0 GiB; write it as .jsonl"),
        ("a.csv.gz", f"a,b\n{SMALL},b\n{LARGE}", "row 2 has 1 MiB or more"),
        ("a.csv.gz", f'a,b\n{SMALL},b\n{SMALL},"' + "a\n" * (1 << 19), "row 2 has 1 MiB or more"),
        ("a.csv.gz", f"a,{LARGE}", "row 1 has 1 MiB or more"),
        ("a.parquet", [{"a": SMALL}, {"a": SMALL}, {"a": LARGE}], "row 3 has 1 MiB or more"),
        ("a.arrow", [{"a": LARGE}], "row 1 has 1 MiB or more"),
    ],
)
def test_a_row_that_unpacks_to_more_than_a_limit_is_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(row_files, "MAX_ROW", 1 << 20)
    monkeypatch.setattr(row_files, "MAX_ARRAY", 1 << 20)
    file = tmp_path / name
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(content.encode()))
    elif file.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(content), file)
    else:
        with pa.ipc.new_file(file, pa.Table.from_pylist(content).schema) as writer:
            writer.write_table(pa.Table.from_pylist(content))
    with pytest.raises(UserError, match=message) as error:
        table_of(file)
    assert str(error.value).startswith(f"data_files={file}")


def test_rows_below_the_limit_are_read_as_they_are(tmp_path, monkeypatch):
    """Whatever all of them have together; an array up to its own limit."""
    monkeypatch.setattr(row_files, "MAX_ROW", 1 << 12)
    monkeypatch.setattr(row_files, "MAX_ARRAY", 1 << 20)
    rows = [{"a": "a" * 4000, "b": f"{number}\n"} for number in range(20)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("a,b\n" + "".join(f'{row["a"]},"{row["b"]}"\n' for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for file in tmp_path.glob("a.*"):
        assert table_of(file) == rows, file
