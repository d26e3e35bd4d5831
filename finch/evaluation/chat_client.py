"""A language model behind any server with OpenAI's protocol: its answers are recorded, within a budget of tokens."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from finch.base.errors import UserError, writing

API_KEY = "OPENAI_API_KEY"
MAX_RETRIES = 8
"""Of a call, by the openai library."""
MAX_FIRST_RETRIES = 2
"""Of a server that has not answered before."""
MAX_UNUSABLE = 3
"""Answers to a request that are empty or cut off."""
_OVERHEAD_TOKENS = 64
"""Of a chat template. The text itself has at most one token per byte, as with a byte-level tokenizer."""
_MIN_KEY_LENGTH = 8
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[!-~]*)?", re.ASCII)
_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"


@dataclass(frozen=True)
class ChatRequest:
    """One question to a model, with a limit of the answer's tokens."""

    model: str
    system: str
    user: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.user}]

    @property
    def key(self) -> str:
        """A hash of the model and the messages."""
        return hashlib.blake2b(json.dumps([self.model, self.messages]).encode(), digest_size=16).hexdigest()

    @property
    def token_limit(self) -> int:
        """An upper bound of the call's tokens, prompt and answer."""
        return len((self.system + self.user).encode()) + _OVERHEAD_TOKENS + self.max_tokens


def read_prompt(file: Path) -> str:
    """The text of ``--prompt``. Raises UserError for a file that cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt={file} cannot be read ({error}); give a file of UTF-8 text") from error


class RequestLog(contextlib.AbstractContextManager["RequestLog"]):
    """A server's answers in an append-only JSON Lines file, from which a later start continues. Safe for threads.

    A line is ``{"key": KEY, "tokens": TOKENS, "text": TEXT}``, with an empty text where the answer is of no use. All answers of the file, those
    of earlier starts included, may take ``budget`` tokens; None: no limit.

    Attributes:
        answers: by the requests' keys.
        problems: of this start, by the keys of requests that have no answer of use, why.
        tokens: that all answers of the file have taken.

    Raises UserError if the file cannot be written, or another process writes it. A full disk raises it later as well.
    """

    def __init__(self, path: Path, budget: int | None = None) -> None:
        self.path, self.budget = path, budget
        try:
            self._file = path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another process; wait until it has ended") from error
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give another path") from error
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # without a last line that was cut off
        self.answers, self.tokens = read_log(path)
        self.problems: dict[str, str] = {}
        self._tokens_in_flight, self._changed = 0, threading.Condition()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextlib.contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Holds tokens of the budget during a call. Where they do not fit, calls in flight are waited for, which usually take less than they
        hold; then raises UserError."""
        with self._changed:
            while self.budget is not None and self.tokens + self._tokens_in_flight + tokens > self.budget:
                if not self._tokens_in_flight:
                    raise UserError(
                        f"the budget of {self.budget:,} tokens is spent: {self.tokens:,} are taken, the next call may take {tokens:,}; raise it"
                    )
                self._changed.wait()
            self._tokens_in_flight += tokens
        try:
            yield
        finally:
            with self._changed:
                self._tokens_in_flight -= tokens
                self._changed.notify_all()

    def add(self, key: str, tokens: int, text: str) -> None:
        """Records an answer, with an empty text where it is of no use."""
        data = (json.dumps({"key": key, "tokens": tokens, "text": text}) + "\n").encode()
        with self._changed:
            self.tokens += tokens
            with writing(f"{self.path}", "make room, then start the same command again"):
                while data:  # what a full disk did not take fails when it is written again
                    data = data[self._file.write(data) :]
                os.fsync(self._file)
            self.answers |= {key: text} if text else {}


def read_log(path: Path) -> tuple[dict[str, str], int]:
    """The answers by key, and all tokens taken, in a log that may not exist."""
    answers, tokens = dict[str, str](), 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off, or what earlier versions reserved
            entry = json.loads(line)
            tokens += int(entry["tokens"])
            answers |= {entry["key"]: entry["text"]} if entry.get("text") else {}
    return answers, tokens


def count_calls(path: Path, requests: Collection[ChatRequest], what: str, done: str) -> str:
    """What a start with the log at ``path`` would send, in a sentence: so many different ``what``, some of them ``done`` before."""
    answers, _ = read_log(path)
    limits = [request.token_limit for request in requests if request.key not in answers]
    return f"{len(requests):,} different {what}, {len(requests) - len(limits):,} of them {done} before; the other {len(limits):,} take at most {sum(limits):,} tokens; nothing was sent"


class ChatClient:
    """A client of the server at ``base_url``, usually ending in ``/v1``.

    ``timeout``: of a call, in seconds. Raises UserError if the address is not one, or the environment has no key.
    """

    def __init__(self, base_url: str, log: RequestLog, *, timeout: float = 120.0) -> None:
        import openai  # takes 2 s, and is an optional dependency

        if not _ADDRESS.fullmatch(base_url):
            raise UserError(f"base_url={base_url} is not an address such as http://localhost:8000/v1; correct it")
        key = os.environ.get(API_KEY, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise UserError(
                f"{API_KEY} is not set, or not in ASCII; export it, with any text for a server without keys"
            )
        self._base_url, self._key, self._log = base_url, key, log
        self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=MAX_RETRIES)
        self._limit = _LIMIT  # the older name, which most servers know

    def complete_all(self, requests: Iterable[ChatRequest], concurrency: int) -> Generator[ChatRequest, None, None]:
        """Asks, ``concurrency`` calls at a time; yields each request once ``answers`` or ``problems`` of the log has its key, in the order of
        the answers. After an error, or where the iterator is closed, no further call is made, and those in flight are recorded.

        Raises UserError if the server cannot be reached, refuses the key or the model, or fails, and if the budget is spent.
        """
        room, is_over = threading.Semaphore(concurrency), threading.Event()

        def at_hand() -> Iterator[ChatRequest]:
            # The pool would read all at once: no call is to begin before the one that makes room for it has been looked at.
            for request in requests:
                room.acquire()
                if is_over.is_set():
                    return
                yield request

        with ThreadPool(concurrency) as pool:  # its threads are daemons: an interrupt does not wait for calls
            try:
                try:
                    for request in pool.imap_unordered(self._ask, at_hand()):
                        room.release()
                        yield request
                finally:
                    is_over.set()
                    room.release()
            except (UserError, GeneratorExit):
                pool.close()
                pool.join()
                raise

    def _ask(self, request: ChatRequest) -> ChatRequest:
        import openai

        problem = ""
        try:
            for _ in range(MAX_UNUSABLE):
                with self._log.reserved(request.token_limit):
                    text, tokens, problem = _read(self._send(request), request)
                    self._log.add(request.key, tokens, self._redacted(text))
                if not problem:
                    break
        except (openai.APIStatusError, openai.APIConnectionError, UnicodeError) as error:
            # UnicodeError: of a host's name that cannot be looked up.
            status: int = getattr(error, "status_code", 0)
            problem = self._line(error if status else error.__cause__ or error)
            if status not in (400, 413, 422):  # a prompt that is too long, or that a filter finds
                key = f"set {API_KEY} to a key that may use this model on this server"
                model = f"check model={request.model} and the address, which usually ends in /v1"
                again = f"check the server and its address, then start again: the answers so far are kept in {self._log.path}"
                remedy = {401: key, 403: key, 404: model}.get(status, again)
                raise UserError(f"base_url={self._base_url}: {problem}; {remedy}") from None
            problem = f"the server refuses it: {problem}"
        if problem:
            self._log.problems[request.key] = self._line(problem)
        return request

    def _send(self, request: ChatRequest) -> str:
        import openai

        limit = self._limit
        client = self._client if self._log.answers else self._client.with_options(max_retries=MAX_FIRST_RETRIES)
        options: dict[str, Any] = {"messages": request.messages, "temperature": 0.0, limit: request.max_tokens}
        try:
            return client.chat.completions.with_raw_response.create(model=request.model, **options).text
        except openai.BadRequestError as error:
            if limit == _NEW_LIMIT or _NEW_LIMIT not in str(error):
                raise
        self._limit = _NEW_LIMIT
        return self._send(request)

    def _line(self, message: object) -> str:
        return self._redacted(" ".join(str(message).split()))[:200]

    def _redacted(self, text: str) -> str:
        # Servers without keys are given short words such as "none", which texts contain.
        return text.replace(self._key, "***") if len(self._key) >= _MIN_KEY_LENGTH else text


def _read(body: str, request: ChatRequest) -> tuple[str, int, str]:
    """A chat completion's text, the tokens that it took, and why it is of no use, without text then."""
    text, used = "", None
    try:
        reply = json.loads(body)
        choice, used = reply["choices"][0], (reply.get("usage") or {}).get("total_tokens")
        text = (choice["message"]["content"] or "").strip().encode("utf-8", "replace").decode()
        problem = "" if text else "the answer is empty"
        if choice.get("finish_reason") == "length":
            text, problem = "", f"the answer was cut off at {request.max_tokens} tokens"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        problem = f"its answer is not a chat completion: {body[:80]!r}"
    return text, used if isinstance(used, int) and used > 0 else request.token_limit, problem
