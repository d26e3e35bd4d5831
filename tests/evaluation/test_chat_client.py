"""The client against a stand-in server: nothing is sent twice, the budget holds, and a start continues the one before it."""

import json
import threading
import time

import pytest
from helpers.chat_server import KEY, ChatServer, chat_server, completion, refusal
from helpers.rows import write_lines
from helpers.runs import disk_of_files_below

pytest.importorskip("openai", reason="the openai extra is not installed")

from finch.base.errors import UserError
from finch.evaluation import chat_client
from finch.evaluation.chat_client import ChatClient, ChatRequest, RequestLog, read_log

TEXTS = ["name a bird", "a finch", "ño\t“x”", "line one\nline two", "a tree"]


@pytest.fixture
def server(monkeypatch):
    with chat_server(monkeypatch) as state:
        yield state


@pytest.fixture
def ask(server, tmp_path):
    """Asks for texts that have no answer, and returns the answers and the problems by text, and all tokens."""

    def ask(texts=TEXTS, budget=None, concurrency=1, url=None, timeout=20.0):
        requests = [request(text) for text in texts]
        try:
            with RequestLog(tmp_path / "log", budget) as log:
                missing = [each for each in requests if each.key not in log.answers]
                done = list(ChatClient(url or server.url, log, timeout=timeout).complete_all(missing, concurrency))
        finally:
            assert KEY not in (tmp_path / "log").read_text()
        assert sorted(map(str, done)) == sorted(map(str, missing))
        found = [
            {each.user: kept[each.key] for each in requests if each.key in kept} for kept in (log.answers, log.problems)
        ]
        return *found, log.tokens

    return ask


def request(text):
    return ChatRequest("m", "Shout.", text, 64)


def upper(texts=TEXTS):
    return {text: text.upper() for text in texts}


def test_each_text_is_asked_for_once(ask, server, tmp_path):
    """An answer is on the disk before the next call, so that a killed command has lost only the calls in flight."""
    kept = []

    def answer(_, text):
        kept.append(len(read_log(tmp_path / "log")[0]))
        return completion(f" {text.upper()}\n")

    server.answer = answer
    assert ask(TEXTS[:2]) == (upper(TEXTS[:2]), {}, 14)
    assert ask() == (upper(), {}, 35)
    assert (server.texts, kept) == (TEXTS, [0, 1, 2, 3, 4])
    assert set(server.keys) == {f"Bearer {KEY}"}
    messages = [{"role": "system", "content": "Shout."}, {"role": "user", "content": "name a bird"}]
    assert server.requests[0] == {"model": "m", "temperature": 0.0, "max_tokens": 64, "messages": messages}


def test_calls_are_made_at_a_time(ask, server):
    server.answer = lambda _, text: time.sleep(0.1) or completion(text.upper())
    assert ask(concurrency=3)[0] == upper()
    assert server.most_at_once == 3


def test_refusals_for_now_are_retried(ask, server):
    server.answer = lambda number, text: completion(text.upper()) if number % 3 == 2 else refusal(429, "slow down")
    assert ask()[0] == upper()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(" \n"), "the answer is empty"),
        (completion("a tr", finish_reason="length"), "the answer was cut off at 64 tokens"),
        ((200, f"<html> {KEY}".encode()), "its answer is not a chat completion: '<html> ***'"),
        ((200, {"choices": []}), "its answer is not a chat completion: '{\"choices\": []}'"),
        (completion(["a"]), "its answer is not a chat completion: "),
    ],
)
def test_useless_answers_are_problems_after_three(ask, server, reply, reason):
    server.answer = lambda _, text: reply if text == "a tree" else completion(text.upper())
    answers, problems, tokens = ask()
    assert (answers, list(problems), server.texts.count("a tree")) == (upper(TEXTS[:-1]), ["a tree"], 3)
    assert problems["a tree"].startswith(reason)
    used = 7 if isinstance(reply[1], dict) and "usage" in reply[1] else request("a tree").token_limit
    assert tokens == 4 * 7 + 3 * used
    server.answer = ChatServer.answer
    assert ask() == (upper(), {}, tokens + 7)  # asked for again


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_the_server_refuses_is_a_problem(ask, server, status):
    """As vLLM refuses a prompt that is too long, and Azure one that its filter finds."""
    server.answer = lambda _, text: refusal(status, "too\nlong") if text == "a finch" else completion(text.upper())
    answers, problems, _ = ask()
    assert answers == upper([text for text in TEXTS if text != "a finch"])
    assert problems["a finch"].startswith(f"the server refuses it: Error code: {status} - ")
    assert len(server.texts) == len(TEXTS)


def test_servers_that_want_max_completion_tokens_get_it(ask, server):
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    server.answer = lambda number, text: (
        refusal(400, message) if "max_tokens" in server.requests[number] else completion(text.upper())
    )
    assert ask()[0] == upper()
    assert [each.get("max_completion_tokens") for each in server.requests] == [None, *[64] * len(TEXTS)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (refusal(401, f"bad key {KEY}"), r"bad key \*\*\*; set OPENAI_API_KEY to a key that may use this model"),
        (refusal(403, "no"), "403 - .*; set OPENAI_API_KEY to a key that may use this model"),
        ((404, b"<html>"), "Error code: 404; check model=m and the address, which usually ends in /v1"),
        (refusal(402, "no\nmoney"), "money.*; check the server and its address, then start again: the answers so far"),
        (refusal(429, "quota"), "quota.*; check the server and its address, then start again"),
    ],
)
def test_refusals_of_all_requests_are_one_line(ask, server, reply, message):
    server.answer = lambda *_: reply
    with pytest.raises(UserError, match=f"^base_url={server.url}: .*{message}") as error:
        ask(list(map(str, range(100))), concurrency=2)
    assert KEY not in str(error.value)
    assert len(server.texts) < 60


def test_server_that_hangs_is_one_line_and_continued(ask, server, monkeypatch):
    released = threading.Event()
    server.answer = lambda number, text: completion(text.upper()) if number < 2 else released.wait(20) and None
    monkeypatch.setattr(chat_client, "MAX_RETRIES", 1)
    with pytest.raises(
        UserError, match="v1: timed out; check the server and its address, then start again: the answers"
    ):
        ask(timeout=0.3)
    released.set()
    server.answer = ChatServer.answer
    server.texts.clear()
    assert ask()[0] == upper()
    assert server.texts == TEXTS[2:]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/v1", r"v1: \[Errno 111\] Connection refused; check the server and its address"),
        (f"http://{'a' * 64}.org/v1", "label empty or too long.*; check the server and its address"),
        ("localhost:8000", "base_url=localhost:8000 is not an address such as http://localhost:8000/v1"),
        ("http://localhost:x/v1", "is not an address"),
        ("http://a\x01b/v1", "is not an address"),
    ],
)
def test_wrong_addresses_are_one_line(ask, server, url, message):
    with pytest.raises(UserError, match=message):
        ask(url=url)
    assert server.texts == []


@pytest.mark.parametrize("key", ["", "a\nb", "clé"])
def test_key_is_needed(ask, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set, or not in ASCII; export it"):
        ask()


def test_who_stops_makes_no_further_call(server, tmp_path):
    with RequestLog(tmp_path / "log") as log:
        results = ChatClient(server.url, log).complete_all(map(request, map(str, range(1000))), 2)
        next(results)
        results.close()
        assert len(log.answers) == len(server.texts) < 100  # those in flight are recorded


def test_budget_is_never_exceeded(ask, server):
    server.answer = lambda _, text: completion(text.upper(), request(text).token_limit)  # as many as were reserved
    budget = sum(request(text).token_limit for text in TEXTS) - 1
    for _ in range(2):  # of all starts, not of one
        with pytest.raises(
            UserError, match=r"the budget of \d+ tokens is spent: \d+ are taken, the next call may take "
        ):
            ask(budget=budget, concurrency=3)
        assert len(server.texts) == len(TEXTS) - 1
    assert ask(budget=budget + 1)[::2] == (upper(), budget + 1)
    assert sorted(server.texts) == sorted(TEXTS)


def test_reserved_tokens_are_freed_by_cheap_and_refused_calls(ask, server):
    server.answer = lambda _, text: refusal(400, "no") if text == "a finch" else completion(text.upper())
    assert len(ask(budget=max(request(text).token_limit for text in TEXTS) + 28, concurrency=4)[0]) == len(TEXTS) - 1
    assert server.most_at_once == 1


def test_log_survives_a_torn_line(ask, server, tmp_path):
    assert ask()[0] == upper()
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        (tmp_path / "log").write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        server.texts.clear()
        assert ask()[0] == upper()
        assert len(server.texts) == len(TEXTS) - kept


def test_logs_of_earlier_versions_are_read(tmp_path):
    lines = [{"key": "a", "reserved": 5}, {"key": "b", "reserved": 9}, {"key": "a", "tokens": 2, "text": "A"}]
    write_lines(tmp_path / "log", *lines, {"key": "b", "tokens": 3})
    with RequestLog(tmp_path / "log") as log:
        assert (log.tokens, log.answers) == (5, {"a": "A"})


def test_full_disk_is_one_line_and_loses_nothing(ask, server, tmp_path):
    size = len(json.dumps({"key": request("").key, "tokens": 7, "text": ""}))
    with (
        disk_of_files_below(3 * size),
        pytest.raises(UserError, match=r"log cannot be written \(File too large\); make r"),
    ):
        ask(concurrency=2)
    done = len(read_log(tmp_path / "log")[0])
    server.texts.clear()
    assert ask()[0] == upper()
    assert len(server.texts) == len(TEXTS) - done == 3


def test_log_of_a_running_command_is_locked(ask, tmp_path):
    with RequestLog(tmp_path / "log"), pytest.raises(UserError, match="log is being written by another process; wait"):
        ask()
    with pytest.raises(UserError, match=r"x/log cannot be written \(No such file or directory\); give another path"):
        RequestLog(tmp_path / "x" / "log")
