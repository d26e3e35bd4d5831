"""`finch data translate` against a stand-in server: nothing is sent twice, the budget holds, and a start continues the one before it."""

import errno
import json
import os
import threading
import time

import pytest
from helpers.chat_server import KEY, ChatServer, chat_server, completion, finch_with_key, refusal
from helpers.rows import write_lines

pytest.importorskip("openai", reason="the openai extra is not installed")

from finch.evaluation import chat_client
from finch.evaluation.chat_client import RequestLog, Translation, read_answers

ROWS = [
    {"id": 1, "instruction": "name a bird", "input": "", "output": "a finch"},
    {"id": 2, "instruction": "name it", "input": "a finch", "output": "line one\nline two"},
    {"id": 3, "instruction": "name a bird", "input": "  ", "output": "ño\t“x”"},
    {"id": 4, "instruction": "what is this", "input": None, "output": "a tree"},
]
TEXTS = ["name a bird", "a finch", "name it", "line one\nline two", "ño\t“x”", "what is this", "a tree"]


@pytest.fixture
def server(monkeypatch):
    with chat_server(monkeypatch) as state:
        yield state


@pytest.fixture
def translate(server, tmp_path, capsys):
    def translate(*options, rows=ROWS):
        file = write_lines(tmp_path / "alpaca.jsonl", *rows)
        command = ["data", "translate", "--data-files", file, "--out", str(tmp_path / "out.jsonl")]
        command += ["--language", "Galician", "--base-url", server.url, "--model", "m", *options]
        return finch_with_key(capsys, tmp_path, *command)

    return translate


def upper(text):
    return text.upper() if text else text


def expected(rows=ROWS):
    fields = ("instruction", "input", "output")
    return [
        row | {name: upper(row[name]) if (row[name] or "").strip() else row[name] for name in fields} for row in rows
    ]


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_each_text_is_translated_once(translate, server, tmp_path):
    code, out, _ = translate()
    assert code == 0
    written = read(tmp_path / "out.jsonl")
    assert written == expected()
    assert list(map(list, written)) == list(map(list, ROWS))  # the order of fields
    assert sorted(server.texts) == sorted(TEXTS)
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert "4 rows in Galician, 49 tokens taken" in out
    assert "Galician" in server.requests[0]["messages"][0]["content"]
    assert (server.requests[0]["model"], server.requests[0]["temperature"]) == ("m", 0)
    assert names(tmp_path) == ["alpaca.jsonl", "out.jsonl", "out.jsonl.requests"]


def test_dry_run_sends_nothing_and_needs_no_key(translate, server, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    code, out, _ = translate("--dry-run", "--limit", "2")
    assert code == 0
    assert out.startswith("2 rows, 4 different texts, 0 of them translated before; the other 4 take at most ")
    assert server.texts == []
    assert names(tmp_path) == ["alpaca.jsonl"]


def test_limit_and_then_all_rows(translate, server, tmp_path):
    assert translate("--limit", "2")[0] == 0
    assert read(tmp_path / "out.jsonl") == expected(ROWS[:2])
    assert translate()[0] == 0
    assert read(tmp_path / "out.jsonl") == expected()
    assert len(server.texts) == len(TEXTS)


def test_calls_are_made_at_a_time(translate, server):
    def slow(_, text):
        time.sleep(0.1)
        return completion(text.upper())

    server.answer = slow
    assert translate("--concurrency", "3")[0] == 0
    assert server.most_at_once == 3


def test_refusals_for_now_are_retried(translate, server, tmp_path):
    def busy(number, text):
        replies = [refusal(429, "slow down"), refusal(500, "oops"), None, (503, b"<html>"), (200, b"{not json")]
        return replies[number % 7] if number % 7 < len(replies) else completion(text.upper())

    server.answer = busy
    assert translate("--concurrency", "1")[0] == 0
    assert read(tmp_path / "out.jsonl") == expected()


def test_slow_server_is_given_up_and_continued(translate, server, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_client, "MAX_TRIES", 2)
    released = threading.Event()
    server.answer = lambda number, text: completion(text.upper()) if number < 3 else released.wait(20) and None
    code, _, err = translate("--concurrency", "1", "--timeout", "1")
    released.set()
    assert code == 1
    assert "no answer after 2 tries (it took longer than the timeout)" in err
    assert read(tmp_path / "out.jsonl.partial") == expected(ROWS[:1])
    done = len(read_answers(tmp_path / "out.jsonl.requests"))
    server.answer = ChatServer.answer
    server.texts.clear()
    assert translate()[0] == 0
    assert len(server.texts) == len(TEXTS) - done == 4
    assert read(tmp_path / "out.jsonl") == expected()
    assert "out.jsonl.partial" not in names(tmp_path)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(" \n"), "the answer is empty"),
        (completion("a \ud83d"), "the answer has halves of surrogate pairs"),
        (completion("a tr", finish_reason="length"), "the answer was cut off at 134 tokens"),
    ],
)
def test_useless_answers_leave_their_rows_out(translate, server, tmp_path, reply, reason):
    server.answer = lambda _, text: reply if text == "a tree" else completion(text.upper())
    code, _, err = translate()
    assert code == 1
    assert f"1 texts got no translation, the first is row 4, output: {reason}" in err
    assert server.texts.count("a tree") == 3
    assert read(tmp_path / "out.jsonl.partial") == expected()[:3]
    assert not (tmp_path / "out.jsonl").exists()


def test_a_request_that_the_server_refuses_leaves_its_row_out(translate, server, tmp_path):
    """As vLLM refuses a prompt that is too long, and Azure one that its filter finds."""
    server.answer = lambda _, text: refusal(400, "too\nlong") if text == "a tree" else completion(text.upper())
    for _ in range(2):
        server.texts.clear()
        code, _, err = translate()
        assert code == 1
        assert (
            "1 texts got no translation, the first is row 4, output: the server refuses it: HTTP 400: too long" in err
        )
        assert server.texts.count("a tree") == 1
        assert read(tmp_path / "out.jsonl.partial") == expected()[:3]


def test_servers_that_want_max_completion_tokens_get_it(translate, server, tmp_path):
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    server.answer = lambda number, text: (
        refusal(400, message) if "max_tokens" in server.requests[number] else completion(text.upper())
    )
    assert translate("--concurrency", "1")[0] == 0
    assert read(tmp_path / "out.jsonl") == expected()
    names = ["max_tokens" if "max_tokens" in each else "max_completion_tokens" for each in server.requests]
    assert names == ["max_tokens"] + ["max_completion_tokens"] * len(TEXTS)


def test_model_of_useless_answers_is_stopped(translate, server):
    rows = [{"instruction": f"name {number}", "output": "b"} for number in range(100)]
    server.answer = lambda *_: completion("")
    code, _, err = translate("--concurrency", "2", rows=rows)
    assert code == 1
    assert len(server.texts) < 3 * 25
    assert "texts got no translation" in err


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (refusal(401, f"bad key {KEY}"), "HTTP 401: bad key ***; set OPENAI_API_KEY to a key of this server"),
        (refusal(403, "no"), "HTTP 403: no; set OPENAI_API_KEY to a key that may use this model"),
        (refusal(402, "no\nmoney"), "HTTP 402: no money; the server does not accept this request"),
        ((404, b"<html>"), "HTTP 404: <html>; check model=m and the address, which usually ends in /v1"),
        ((200, b"<html>"), "no answer after 3 tries (its answer is not a chat completion"),
        ((200, {"choices": []}), "no answer after 3 tries (its answer is not a chat completion"),
        (refusal(429, "quota"), "no answer after 8 tries (HTTP 429: quota); check the server"),
    ],
)
def test_refusals_end_the_command_in_one_line(translate, server, reply, message):
    server.answer = lambda *_: reply
    code, _, err = translate("--concurrency", "1")
    assert code == 1
    assert f"finch: error: base_url={server.url}: {message}" in err
    assert len(server.texts) in (1, 3, 8)


def reserved(text):
    return Translation([], (), "Galician", "m").request(text).token_limit


def test_budget_is_never_exceeded(translate, server, tmp_path):
    # A server that counts as many tokens as were reserved for a call.
    server.answer = lambda _, text: completion(text.upper(), reserved(text))
    budget = 2000
    code, _, err = translate("--max-tokens-budget", str(budget), "--concurrency", "3")
    with RequestLog(tmp_path / "out.jsonl.requests") as log:
        spent, done = log.tokens, len(log.answers)
    assert code == 1
    assert 0 < spent <= budget
    assert done == len(server.texts) < len(TEXTS)
    assert f"the budget of 2,000 tokens is spent: {spent:,} are taken, and the next call may take " in err
    assert translate("--max-tokens-budget", str(budget))[0] == 1  # of all starts, not of one
    assert len(server.texts) == done
    assert translate("--max-tokens-budget", "100000")[0] == 0
    assert sorted(server.texts) == sorted(TEXTS)


def test_reserved_tokens_are_freed_by_cheap_calls(translate, server):
    assert translate("--max-tokens-budget", str(max(map(reserved, TEXTS)) + 49), "--concurrency", "4")[0] == 0
    assert server.most_at_once == 1


def test_log_survives_a_torn_line_and_a_killed_process(translate, server, tmp_path):
    assert translate()[0] == 0
    content, file = (tmp_path / "out.jsonl").read_bytes(), tmp_path / "out.jsonl.requests"
    lines = file.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        file.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        answers = sum(b'"text"' in line for line in lines[:kept])
        server.texts.clear()
        assert translate()[0] == 0
        assert len(server.texts) == len(TEXTS) - answers
        assert (tmp_path / "out.jsonl").read_bytes() == content


def test_log_counts_calls_that_were_cut_off(tmp_path):
    file = tmp_path / "x"
    write_lines(file, {"key": "a", "reserved": 5}, {"key": "b", "reserved": 9}, {"key": "a", "tokens": 2, "text": "A"})
    with RequestLog(file, budget=20) as log:
        assert (log.tokens, log.answers) == (11, {"a": "A"})
        assert log.reserve("c", 9)
        log.settle("c", 9, 9)
        assert not log.reserve("c", 1)


def test_full_disk_is_one_line_and_loses_nothing(translate, server, tmp_path, monkeypatch):
    write, lines = os.write, []

    def full(file, data):
        if data.startswith(b'{"key"'):
            lines.append(data)
        if len(lines) > 7:
            write(file, data[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        code, _, err = translate("--concurrency", "3")
    assert code == 1
    assert "out.jsonl.requests cannot be written (No space left on device); make room" in err
    done = len(read_answers(tmp_path / "out.jsonl.requests"))
    server.texts.clear()
    assert translate()[0] == 0
    assert len(server.texts) == len(TEXTS) - done
    assert read(tmp_path / "out.jsonl") == expected()


def test_answers_are_on_the_disk_before_the_next_call(translate, server, tmp_path):
    """So that a killed command has lost only the calls in flight."""
    kept = []

    def answer(_, text):
        kept.append(len(read_answers(tmp_path / "out.jsonl.requests")))
        return completion(text.upper())

    server.answer = answer
    assert translate("--concurrency", "1")[0] == 0
    assert kept == list(range(len(TEXTS)))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "a", "answer": "b"}], (), "the rows are question/answer; rows to translate have instruction"),
        ([*ROWS, {"instruction": "a", "output": None}], (), "row 5: its field 'output' is missing; fix or remove"),
        ([*ROWS, {"instruction": 3, "output": "a"}], (), "row 5: its field 'instruction' is int, not text"),
        (['{"instruction": "\\ud83d", "output": "a"}'], (), "half of a character that is written as two"),
        (ROWS, ("--base-url", "localhost:8000"), "base_url=localhost:8000 must start with http:// or https://"),
        (ROWS, ("--base-url", "http://127.0.0.1:9/v1"), "no answer after 3 tries ([Errno 111] Connection refused)"),
        (ROWS, ("--out", "/nowhere/x.jsonl"), "there is no folder /nowhere; create it"),
    ],
)
def test_mistakes_are_one_line(translate, server, rows, options, message):
    code, _, err = translate(*options, rows=rows)
    assert code == 1
    assert message in err
    assert server.texts == []


def test_key_is_needed(translate, server, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    code, _, err = translate()
    assert code == 1
    assert "OPENAI_API_KEY is not set in the environment; export it" in err
    assert names(tmp_path) == ["alpaca.jsonl"]
    monkeypatch.setenv("OPENAI_API_KEY", "a\nb")
    assert "has characters that no request can carry" in translate()[2]


def test_out_may_not_be_the_input(translate, tmp_path):
    code, _, err = translate("--out", str(tmp_path / "alpaca.jsonl"))
    assert code == 1
    assert "is one of the files to translate" in err
    assert read(tmp_path / "alpaca.jsonl") == ROWS


def test_log_of_a_running_command_is_locked(translate, tmp_path):
    with RequestLog(tmp_path / "out.jsonl.requests"):
        assert "is being written by another process" in translate()[2]
    (tmp_path / "out.jsonl.requests").write_text("{}\n")
    assert "line 1 is not a recorded call; remove that line" in translate()[2]
