"""Rows of files as other readers have them: json, csv, pyarrow, datasets; and files that cannot be read."""

import csv
import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from finch.base.errors import UserError
from finch.data import cache
from finch.data.row_files import read_rows
from finch.data.rows import load_table, train_validation_split
from finch.data.table import FileRows, Table, read_table

ROWS = [
    {"question": "when?", "answer": "2024-06-01T00:30:00+02:00", "id": 10**25},
    {"answer": "5.50", "content": [{"type": "text", "text": "a\u2028é\\n🐦"}]},
    {"content": "text", "n": None, "x": [1, 1.50, True], "key 2": {"a": {}}},
]


@pytest.fixture
def put(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines(ROWS)),
        ("a.JSONL", "\ufeff" + lines(ROWS)),
        ("a.jsonl", lines(ROWS).replace("\n", "\r\n\r\n  \n")),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json.GZ", gzip.compress(lines(ROWS).encode(), mtime=0)),
    ],
)
def test_json_rows_are_those_of_json(put, name, content):
    rows = FileRows(file := put(name, content), "json")
    assert list(Table([rows])) == list(read_rows(file, "json")) == ROWS
    assert rows.column_names == ["question", "answer", "id", "content", "n", "x", "key 2"]


CSV = 'question,answer,n\r\n"a,\nb","say ""x""",\n\nNA,2024-01-12,1.50\n' + f"{'long ' * 40_000},x,None\n"


@pytest.mark.parametrize("content", [CSV, "\ufeff" + CSV.rstrip("\n")])
def test_csv_cells_are_those_of_csv(put, content):
    file = put("a.csv", content)
    csv.field_size_limit(10**9)
    with file.open(newline="", encoding="utf-8-sig") as text:
        expected = [{name: cell or None for name, cell in row.items()} for row in csv.DictReader(text)]
    assert list(read_table([file], "csv")) == expected
    assert [len(row["question"]) for row in expected] == [4, 2, 200_000]


def test_columns_of_arrow_and_parquet_are_their_own(tmp_path):
    tables = [pyarrow.table({"a": ["5.50", None], "b": [1, 2]}), pyarrow.table({"b": [b"x"], "c": [[{"d": "e"}]]})]
    for number, table in enumerate(tables):
        parquet.write_table(table, tmp_path / f"{number}.parquet")
        with pyarrow.ipc.new_stream(str(tmp_path / f"{number}.arrow"), table.schema) as writer:
            writer.write_table(table)
    with pyarrow.ipc.new_file(str(tmp_path / "1.arrow"), tables[1].schema) as writer:
        writer.write_table(tables[1])
    for source in ("parquet", "arrow"):
        read = read_table([tmp_path / f"{number}.{source}" for number in (0, 1)], source)
        assert list(read) == [*tables[0].to_pylist(), *tables[1].to_pylist()]
        assert read.column_names == ["a", "b", "c"]


def test_categories_are_their_texts(tmp_path):
    """pandas' categories: batches of a parquet file have dictionaries of their own."""
    colors = [f"color {number % 7}" for number in range(2500)]
    table = pyarrow.table({"color": pyarrow.array(colors).dictionary_encode(), "n": range(2500)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=900)
    read = read_table([tmp_path / "a.parquet"], "parquet")
    assert read["color"] == colors
    assert read[2400] == {"color": colors[2400], "n": 2400}


def test_a_column_of_two_is_named(tmp_path):
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["n", "n"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has the column 'n' twice; rename one of them"):
        read_table([tmp_path / "a.parquet"], "parquet")


def test_parts_and_splits_are_those_of_datasets(put):
    rows = [{"n": number} for number in range(57)]
    files = [put("a.jsonl", lines(rows[:20])), put("b.jsonl", lines(rows[20:]))]
    for split in ("train", "train[10:40]", "train[:10%]+train[-3:]"):
        table = load_table("json", None, files, name=None, split=split)
        reference = datasets.load_dataset("json", data_files=list(map(str, files)), split=split)
        assert table["n"] == list(reference["n"])
        parts = reference.train_test_split(test_size=max(1, round(0.2 * len(reference))), seed=3)
        for part, name in (("train", "train"), ("validation", "test")):
            share = train_validation_split(table, part, 0.2, 3)
            assert share["n"] == sorted(parts[name]["n"])
            assert [
                share.origin(index)[1] - 1 + 20 * (share.origin(index)[0] == str(files[1]))
                for index in range(len(share))
            ] == share["n"]
    with pytest.raises(UserError, match=r"dataset.split=test: Unknown split"):
        load_table("json", None, files, name=None, split="test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"a": "b"}\n{"a": "\xe9t\xe9"}',
            r"row 2 is not UTF-8 \(byte 0xe9\), perhaps cp1252; .* iconv -f cp1252",
        ),
        ("a.csv", "a,b\n1,2\ncafé,3\n".encode("cp1252"), r"row 2 is not UTF-8 \(byte 0xe9\)"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "is not UTF-8 .its first bytes are UTF-16's"),
        ("a.jsonl", lines(ROWS).encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8"),
        ("a.jsonl", '{"a": 1}\n{"a": {"b": 1, "b": 2}}', "row 2 is not JSON .it has the field 'b' twice"),
        ("a.json", '[{"a": 1, "a": 2}]', "it has the field 'a' twice"),
        ("a.csv", "a,b,a\n1,2,3\n", "its header has the column 'a' twice; rename"),
        ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', "row 2 opens a quotation mark that is not closed"),
        ("a.csv", 'a,b\n1,2\n1,"say \\"yes\\" then"\n', "row 2 opens a quotation mark that ends within its field"),
        ("a.csv", "a,b\n1,2,3\n", "row 1 has more fields than the header"),
        ("a.jsonl.gz", gzip.compress(b"x" * 999, mtime=0)[:-9], "cannot be read as json .Compressed file ended"),
        ("a.parquet", "PAR1", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read_are_named(put, name, content, message):
    file = put(name, content)
    with pytest.raises(UserError, match=message) as raised:
        read_table([file], {"csv": "csv", "quet": "parquet"}.get(name.rpartition(".")[2][-4:], "json"))
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_cache_is_shared_and_made_again_where_it_is_damaged(put, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = put("a.jsonl", lines(ROWS))
    assert list(read_table([file], "json")) == ROWS
    stored = max((tmp_path / "cache").glob("*/*.arrow"), key=lambda path: path.stat().st_size)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write", None)  # nothing is made twice
        assert list(read_table([put("same.jsonl", lines(ROWS))], "json")) == ROWS
    content = stored.read_bytes()
    for damaged in (content[:-9], content[:500] + b"x" + content[501:], b""):
        stored.write_bytes(damaged)
        assert list(read_table([file], "json")) == ROWS
        assert stored.read_bytes() == content
    assert list(read_table([put("a.jsonl", lines(ROWS[:1]))], "json")) == ROWS[:1]
    assert not caplog.records


@pytest.mark.parametrize("reason", ["File exists", "No space left on device"])
def test_rows_are_kept_in_memory_where_the_cache_cannot_be_written(put, tmp_path, monkeypatch, caplog, reason):
    folder = put("cache", "") if reason == "File exists" else tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    if reason != "File exists":
        monkeypatch.setattr(cache, "_write", full)
    assert list(read_table([put("a.jsonl", lines(ROWS))], "json")) == ROWS
    assert "kept in memory" in caplog.text
    assert str(folder) in caplog.text
    assert "HF_DATASETS_CACHE names another" in caplog.text
