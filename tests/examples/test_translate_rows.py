"""examples/translate_rows.py against a stand-in server that answers in capitals."""

import json

import pytest
from helpers.chat_server import ChatServer, chat_server, completion, finch_with_key, refusal
from helpers.evaluation import read_lines
from helpers.rows import write_lines

pytest.importorskip("openai", reason="the openai extra is not installed")

from examples.translate_rows import MAX_FAILED, main

ROWS = [
    {"id": 1, "instruction": "name a bird", "input": "", "output": "a finch"},
    {"id": 2, "instruction": "name it", "input": "a finch", "output": "line one\nline two"},
    {"id": 3, "instruction": "name a bird", "input": "  ", "output": "ño\t“x”"},
    {"id": 4, "instruction": "what is this", "input": None, "output": "a tree"},
]
EXPECTED = [{name: text.upper() if isinstance(text, str) else text for name, text in row.items()} for row in ROWS]
NUM_TEXTS = 7


@pytest.fixture
def server(monkeypatch):
    with chat_server(monkeypatch) as state:
        yield state


@pytest.fixture
def translate(server, tmp_path, capsys):
    def translate(*options, rows=ROWS):
        file = write_lines(tmp_path / "alpaca.jsonl", *rows)
        command = ["--data-files", file, "--out", str(tmp_path / "out.jsonl"), "--language", "Galician"]
        command += ["--base-url", server.url, "--model", "m", *options]
        return finch_with_key(capsys, tmp_path, *command, main=main)

    return translate


def test_each_text_is_translated_once(translate, server, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("OPENAI_API_KEY")
        code, out, _ = translate("--dry-run", "--limit", "2")
    assert code == 0
    assert out.startswith("2 rows, 4 different texts, 0 of them translated before; the other 4 take at most ")
    assert [path.name for path in tmp_path.iterdir()] == ["alpaca.jsonl"]
    assert translate("--limit", "2")[0] == 0
    assert read_lines(tmp_path / "out.jsonl") == EXPECTED[:2]
    code, out, _ = translate()
    assert "4 of 4 rows in Galician, 49 tokens taken" in out
    assert json.dumps(read_lines(tmp_path / "out.jsonl")) == json.dumps(EXPECTED)  # the order of fields, too
    assert len(server.texts) == len(set(server.texts)) == NUM_TEXTS
    assert "Galician" in server.requests[0]["messages"][0]["content"]


def test_prompt_of_a_file(translate, server, tmp_path):
    (tmp_path / "b4.txt").write_text("Into {language}, as {json}.\n")
    assert translate("--prompt", str(tmp_path / "b4.txt"))[0] == 0
    assert {each["messages"][0]["content"] for each in server.requests} == {"Into Galician, as {json}."}
    assert "--prompt=/nowhere cannot be read" in translate("--prompt", "/nowhere")[2]


def test_texts_without_a_translation_leave_their_rows_out(translate, server, tmp_path):
    server.answer = lambda _, text: refusal(400, "no") if text == "a tree" else completion(text.upper())
    code, _, err = translate()
    assert code == 1
    assert "1 texts got no translation, the first is row 4, output: the server refuses it: Error code: 400" in err
    assert read_lines(tmp_path / "out.jsonl.partial") == EXPECTED[:3]
    assert not (tmp_path / "out.jsonl").exists()
    server.answer = ChatServer.answer
    assert translate()[0] == 0
    assert read_lines(tmp_path / "out.jsonl") == EXPECTED
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_model_of_useless_answers_is_stopped(translate, server):
    server.answer = lambda *_: completion("")
    code, _, err = translate(rows=[{"instruction": f"name {number}", "output": "b"} for number in range(100)])
    assert code == 1
    assert len(server.texts) < 3 * (MAX_FAILED + 10)
    assert "texts got no translation" in err


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "a", "answer": "b"}], (), "the rows are question/answer; rows to translate have instruction"),
        ([*ROWS, {"instruction": "a", "output": None}], (), "row 5: its field 'output' is missing; fix that row"),
        ([*ROWS, {"instruction": 3, "output": "a"}], (), "row 5: its field 'instruction' is int, not text"),
        (['{"instruction": "\\ud83d", "output": "a"}'], (), "half of a character that is written as two"),
        (ROWS, ("--out", "/nowhere/x.jsonl"), "cannot be written (No such file or directory); give another path"),
    ],
)
def test_mistakes_are_one_line(translate, server, tmp_path, rows, options, message):
    code, _, err = translate(*options, rows=rows)
    assert (code, server.texts) == (1, [])
    assert message in err
    assert "is one of the files to translate" in translate("--out", str(tmp_path / "alpaca.jsonl"))[2]
