import pytest
from helpers.rows import openai, sharegpt

from finch.base.errors import UserError, one_line
from finch.data.formats import detect, detect_columns

TURNS = openai(("user", "a"), ("assistant", "b"))
SHAREGPT = sharegpt(("user", "a"), ("assistant", "b"))
QA = {"question": "a", "answer": "b"}
PROMPT = {"prompt": "a", "completion": "b"}
CONTEXT = {"instruction": "instruction", "input": "context", "output": "response"}


@pytest.mark.parametrize(
    ("row", "format", "columns"),
    [
        (QA, "question_answer", {"question": "question", "answer": "answer"}),
        ({"query": "a", "response": "b"}, "question_answer", {"question": "query", "answer": "response"}),
        (PROMPT, "prompt_completion", {"prompt": "prompt", "completion": "completion"}),
        ({"input": "a", "output": "b"}, "prompt_completion", {"prompt": "input", "completion": "output"}),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt_completion", None),
        ({"instruction": "a", "output": "b", "text": "a b"}, "instruction", None),
        ({"instruction": "a", "context": "c", "response": "b"}, "instruction", CONTEXT),
        ({"prompt": "a", "messages": TURNS}, "messages", {"messages": "messages"}),
        ({"conversations": TURNS}, "messages", {"messages": "conversations"}),
        ({"conversations": SHAREGPT}, "sharegpt", {"conversations": "conversations"}),
        ({"text": "a"}, "text", {"text": "text"}),
    ],
)
def test_detect_format_and_columns(write, row, format, columns):
    found = detect(write(row, row))
    assert (found.format, found.source, found.num_rows) == (format, "json", 2)
    assert found.columns == (columns or found.columns)
    assert sorted([*found.columns.values(), *found.unused_columns]) == sorted(row)


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        (QA, ("id",)),
        ({"messages": TURNS}, ("history", "id")),
        (PROMPT, ("history", "id")),
        ({"text": "a"}, ("system", "system_prompt", "tools", "history", "id")),
    ],
)
def test_columns_that_are_read_beside_the_fields_are_not_unused(write, row, unused):
    others = {"system": "a", "system_prompt": "a", "tools": "[]", "history": [], "id": 3}
    assert detect(write({**row, **others})).unused_columns == unused


def test_detect_optional_input_in_a_later_row(write):
    found = detect(write({"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}))
    assert found.columns["input"] == "input"


def test_detect_column_map_gives_the_format(write):
    file = write({"Frage": "a", "Antwort": "b"})
    found = detect(file, column_map={"question": "Frage", "answer": "Antwort"})
    assert (found.format, found.columns) == ("question_answer", {"question": "Frage", "answer": "Antwort"})
    with pytest.raises(UserError, match=r"column_map.answer=Reply: the rows have no such column, only Frage"):
        detect(file, column_map={"question": "Frage", "answer": "Reply"})
    with pytest.raises(UserError, match=r"column_map names the fields question, which are no row format's"):
        detect(file, column_map={"question": "Frage"})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([QA, QA, PROMPT], "row 3 is prompt/completion, the rows before it are question/answer; one dataset holds one"),
        ([{"messages": TURNS}, {"messages": SHAREGPT}], "row 2 is ShareGPT conversations .* before it are messages"),
        ([QA, '{"question": '], "row 2 is not JSON"),
        ([QA, "[1]"], "row 2 is not a JSON object"),
        (["[1, 2]"], "each of the rows 1, 2 is not a JSON object"),
        (["[1, 2"], "is not a JSON array"),
        ([QA, "[" * 3000], r"row 2 is not JSON \(maximum recursion depth"),
        ([QA, b'{"question": "\xe9t\xe9", "answer": "a"}'], r"is not UTF-8 \(byte 0xe9\), perhaps cp1252; write it"),
        (
            [{"Frage": "a"}],
            r"jsonl: name the columns, such as dataset.column_map.question=COLUMN .*: row 1 has the fields Frage, which are no known row format",
        ),
        (
            [{"question;answer": "a;b"}],
            "row 1 has one field, 'question;answer': its columns are separated by ';'; separate",
        ),
        ([{"dialog": TURNS}], r"in the column 'dialog'; name it: dataset.column_map.messages=dialog$"),
        ([{"dialog": SHAREGPT}], r"in the column 'dialog'; name it: dataset.column_map.conversations=dialog$"),
        (
            [{f"column {i}": "a" for i in range(99)}],
            r"row 1 has the fields column 0, column 1, .*, column \d, .*\.\.\., which are no known row format .docs/data.md.$",
        ),
        (
            [QA, "[1]", *["{"] * 12, "null", QA],
            r"each of the rows 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ... \(12\) is not JSON \(Expe",
        ),
        (
            [QA, "[1]", "{", "null"],
            r"row 2 is not a JSON object, it has no fields, row 3 is not JSON \(.*\), row 4 is null, .* fix or remove them",
        ),
        (
            [QA, PROMPT, QA, PROMPT],
            "each of the rows 2, 4 is prompt/completion, the rows before it are question/answer",
        ),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            r"these are preferences, .*dataset.column_map.completion=chosen",
        ),
        (
            [{"chosen": TURNS, "rejected": TURNS}],
            r"these are preferences, .* dataset\.column_map\.messages=chosen",
        ),
        ([{"question": "a", "answer": None}], "row 1: the field 'answer' is null, not text"),
        (["null"], "row 1 is null, not a JSON object"),
        ([{"question": "a", "answer": 4}], "row 1: the field 'answer' is not text"),
        ([{"messages": "a"}], "row 1: the field 'messages' is not a list of turns with role and content"),
        ([""], "data_files is empty"),
        ([], "data_files is empty"),
    ],
)
def test_detect_bad_rows_raise(write, rows, message):
    with pytest.raises(UserError, match=message) as raised:
        detect(write(*rows))
    assert one_line(str(raised.value)) == str(raised.value)  # whole


def test_detect_bad_paths_raise(write, tmp_path):
    files = [write(QA), write("question,answer", "a,b", name="rows.csv"), write(PROMPT, name="other.jsonl")]
    for data_files, message in (
        (str(tmp_path / "absent.jsonl"), "absent.jsonl does not exist; correct the path"),
        (str(tmp_path), r"is a directory; name its files, such as .*\*.jsonl"),
        (str(tmp_path / "*.tsv"), "matches no file"),
        ([], "names no file"),
        ([files[0], str(tmp_path / "*.jsonl")], r"rows.jsonl more than once"),
        (write(QA, name="rows.txt"), "unknown extension; known are .jsonl, .json, .csv, .parquet, .arrow"),
        (files[:2], "are of different kinds"),
        (files[::2], r"other.jsonl: row 1 is prompt/completion, the rows of .*rows.jsonl are question/answer"),
    ):
        with pytest.raises(UserError, match=message):
            detect(data_files)


def test_row_that_lacks_a_field_is_left_to_the_dataset(write):
    assert detect(write(QA, {"question": "a"}, QA)).num_rows == 3


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        (PROMPT, "question_answer", r"=question_answer, but the rows look like prompt/completion; set"),
        ({"Frage": "a"}, "text", r"=text needs a column 'text'; name it: .*text=COLUMN; the rows have Frage"),
        (PROMPT, "chat", r"=chat must be one of auto, messages"),
    ],
)
def test_detect_columns_refuses_another_format(row, format, message):
    with pytest.raises(UserError, match=f"format{message}"):
        detect_columns(row, row, format)


def test_detect_leaves_a_broken_first_row_to_the_check_of_all_rows(write):
    found = detect(write({"question": "a", "answer": None}, {"question": "a", "answer": 4}, QA))
    assert (found.format, found.num_rows) == ("question_answer", 3)
