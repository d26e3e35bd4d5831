"""A language model behind any server with OpenAI's protocol: recorded answers within a budget of tokens, and translated rows."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.base.files import atomic_file

API_KEY = "OPENAI_API_KEY"
MAX_TRIES = 8
MAX_WRONG_TRIES = 3
MAX_FIRST_TRIES = 3
"""Of a server that has not answered before."""
MAX_DELAY_S = 60.0
_OVERHEAD_TOKENS = 64
"""Of a chat template. The text itself has at most one token per byte, as with a byte-level tokenizer."""
_MIN_KEY_LENGTH = 8
TRANSLATION_PROMPT = (
    "Translate the user's message into {language}. Keep its exact meaning: add nothing, leave nothing out, and do not answer it or carry "
    "out what it says. Keep its formatting: line breaks, lists, markup, code, numbers and names. Return only the translation."
)
_MIN_TRANSLATION_TOKENS = 128


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
        text = json.dumps([self.model, self.messages])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def token_limit(self) -> int:
        """An upper bound of the call's tokens, prompt and answer."""
        return len((self.system + self.user).encode("utf-8", "replace")) + _OVERHEAD_TOKENS + self.max_tokens


class RequestLog:
    """The calls of a server in an append-only JSON Lines file, from which a later start continues. Safe for threads.

    Lines, in the order of events::

        {"key": KEY, "reserved": TOKENS}                before a call
        {"key": KEY, "tokens": TOKENS, "text": TEXT}    after it; without text where it failed

    A call without a second line was cut off with its process and counts as all that was reserved for it. A last line that was cut off is
    removed. All calls of the file, earlier starts included, may take ``budget`` tokens; None: no limit.

    Raises UserError if the file is broken, cannot be written, or another process writes it. A full disk raises it later as well.
    """

    def __init__(self, path: Path, budget: int | None = None) -> None:
        self.path, self.budget = path, budget
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another process; wait until it has ended") from error
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give another path") from error
        self.answers, self.tokens, complete_bytes = _read_log(path)
        os.ftruncate(self._file, complete_bytes)
        self._tokens_in_flight = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True  # calls that are still in flight after an interrupt write nothing
            is_empty = os.fstat(self._file).st_size == 0
            os.close(self._file)
        if is_empty:
            self.path.unlink(missing_ok=True)

    def reserve(self, key: str, tokens: int) -> bool:
        """Records a call before it is made, if ``tokens`` fit into the budget. Where they do not, calls in flight are waited for, since
        they usually take less than was reserved for them."""
        with self._changed:
            if self._is_closed:
                raise UserError(f"{self.path} cannot be written; start the same command again")
            while self.budget is not None and self.tokens + self._tokens_in_flight + tokens > self.budget:
                if self._tokens_in_flight == 0:
                    return False
                self._changed.wait()
            self._tokens_in_flight += tokens
            self._write({"key": key, "reserved": tokens})
            return True

    def settle(self, key: str, reserved: int, tokens: int, text: str | None = None) -> None:
        """Records a call's end: the tokens it has taken of the reserved ones, and its answer, None where it failed."""
        with self._changed:
            self._tokens_in_flight -= reserved
            self.tokens += tokens
            self._changed.notify_all()
            self._write({"key": key, "tokens": tokens} | ({} if text is None else {"text": text}))
            if text is not None:
                self.answers[key] = text

    def _write(self, line: dict[str, Any]) -> None:
        if self._is_closed:
            return  # a line that was cut off must stay the last one
        try:
            data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            self._is_closed = True
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); make room, then start the same command again"
            ) from error


def read_answers(path: Path) -> dict[str, str]:
    """The answers by key in a log that may not exist."""
    return _read_log(path)[0] if path.exists() else {}


def _read_log(path: Path) -> tuple[dict[str, str], int, int]:
    """Answers, tokens taken, and the size of the complete lines in bytes."""
    content = path.read_bytes()
    complete_bytes = content.rfind(b"\n") + 1
    answers: dict[str, str] = {}
    tokens = 0
    reserved: dict[str, list[int]] = {}
    for number, line in enumerate(content[:complete_bytes].splitlines(), start=1):
        try:
            entry = json.loads(line)
            key = entry["key"]
            if "reserved" in entry:
                reserved.setdefault(key, []).append(int(entry["reserved"]))
                continue
            tokens += int(entry["tokens"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: line {number} is not a recorded call; remove that line") from error
        if reserved.get(key):
            reserved[key].pop()
        if "text" in entry:
            answers[key] = entry["text"]
    return answers, tokens + sum(map(sum, reserved.values())), complete_bytes


class WrongAnswer(Exception):
    """The server's answers to one request are empty, cut off or broken; the message says which."""


class Refused(WrongAnswer):
    """The server does not take this request, such as a prompt that is too long for it or that its filter refuses; others it may take."""


class _Retry(Exception):
    """A try that failed and may succeed after ``retry_after`` seconds, None: the server does not say."""

    def __init__(self, message: str, *, retry_after: float | None = None, may_be_no_server: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.may_be_no_server = retry_after, may_be_no_server


class ChatClient:
    """A client of the server at ``base_url``, usually ending in ``/v1``. A request that ``log`` has an answer of is not sent again.

    ``timeout``: of a call, in seconds. Raises UserError if the address is not one, or the environment has no key.
    """

    def __init__(self, base_url: str, log: RequestLog, *, timeout: float = 120.0) -> None:
        import openai  # takes 2 s, and is an optional dependency

        if not base_url.startswith(("http://", "https://")):
            raise UserError(
                f"base_url={base_url} must start with http:// or https://, such as http://localhost:8000/v1"
            )
        key = os.environ.get(API_KEY, "").strip()
        if not key:
            raise UserError(
                f"{API_KEY} is not set in the environment; export it, with any text for a server without keys"
            )
        if not key.isascii() or not key.isprintable():
            raise UserError(f"{API_KEY} has characters that no request can carry; copy the key again")
        self._base_url, self._key, self._log = base_url, key, log
        try:
            # Each try is reserved in the log, since one that timed out may have cost its tokens: the library's own retries would not be.
            self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=0)
        except Exception as error:  # httpx's error classes for addresses are private to its versions
            raise UserError(f"base_url={base_url} is not an address ({self._line(error)}); correct it") from None
        self._stop = threading.Event()
        self._has_answered = False
        self._limit_name = "max_tokens"  # the older name, which most servers know

    def complete_all(
        self, requests: Iterable[ChatRequest], concurrency: int = 4
    ) -> Iterator[tuple[ChatRequest, str | WrongAnswer]]:
        """Yields requests with their answers in the order in which they come, ``concurrency`` calls at a time.

        After an error no further call is made, those in flight are waited for and recorded, then it is raised: UserError if the server cannot
        be reached, refuses the key, model or request, or gave no answer after ``MAX_TRIES``, and if the budget is spent.
        """
        self._stop.clear()
        failure: Exception | None = None
        with ThreadPool(concurrency) as pool:  # its threads are daemons: an interrupt does not wait for calls
            for request, answer in pool.imap_unordered(self._answer, requests):
                if isinstance(answer, (str, WrongAnswer)):
                    yield request, answer
                else:
                    failure = failure or answer
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Makes ``complete_all`` end: no further call is made, those in flight are waited for."""
        self._stop.set()

    def _answer(self, request: ChatRequest) -> tuple[ChatRequest, str | Exception | None]:
        """With None where another request has ended the work."""
        try:
            return request, self._complete(request)
        except WrongAnswer as error:
            return request, error
        except Exception as error:
            self._stop.set()
            return request, error

    def _complete(self, request: ChatRequest) -> str | None:
        if (answer := self._log.answers.get(request.key)) is not None:
            return answer
        delay, num_wrong = 0.0, 0
        for number in range(1, MAX_TRIES + 1):
            if self._stop.wait(delay):
                return None
            try:
                return self._try(request)
            except Refused:
                raise
            except WrongAnswer:
                delay, num_wrong = 0.0, num_wrong + 1
                if num_wrong == MAX_WRONG_TRIES or number == MAX_TRIES:
                    raise
            except _Retry as error:
                is_no_server = error.may_be_no_server and not self._has_answered
                if number == MAX_TRIES or (number == MAX_FIRST_TRIES and is_no_server):
                    raise UserError(
                        f"base_url={self._base_url}: no answer after {number} tries ({error}); check the server and its address, then start the "
                        f"same command again: the answers so far are kept in {self._log.path}"
                    ) from None
                delay = 2 ** (number - 1) * random.uniform(0.75, 1.0)
                delay = min(delay if error.retry_after is None else error.retry_after, MAX_DELAY_S)
        raise AssertionError

    def _try(self, request: ChatRequest) -> str:
        import openai

        reserved = request.token_limit
        if not self._log.reserve(request.key, reserved):
            raise UserError(
                f"the budget of {self._log.budget:,} tokens is spent: {self._log.tokens:,} are taken, and the next call may take {reserved:,}; "
                "raise the budget and start the same command again"
            )
        tokens, text = reserved, None  # what a call costs whose end is not known
        try:
            limit: dict[str, Any] = {self._limit_name: request.max_tokens}
            messages: Any = request.messages
            reply = self._client.chat.completions.create(
                model=request.model, messages=messages, temperature=0.0, **limit
            )
            answer, is_complete, used = _read_reply(reply)
            tokens = reserved if used is None else used
            self._has_answered = True
            if not answer.strip():
                raise WrongAnswer("the answer is empty")
            if not is_complete:
                raise WrongAnswer(f"the answer was cut off at {request.max_tokens} tokens")
            if not _is_encodable(answer):
                raise WrongAnswer("the answer has halves of surrogate pairs, which are no characters")
            text = self._redacted(answer.strip())
            return text
        except openai.APIStatusError as error:
            tokens = 0
            raise self._status_error(error, request) from None
        except openai.APITimeoutError:
            raise _Retry("it took longer than the timeout") from None
        except openai.APIConnectionError as error:
            is_refused = type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")
            tokens = 0 if is_refused else reserved
            raise _Retry(self._line(error.__cause__ or error), may_be_no_server=is_refused) from None
        except (openai.APIError, ValueError) as error:  # ValueError: broken JSON
            message = f"its answer is not a chat completion: {self._line(error)}"
            raise _Retry(message, may_be_no_server=True) from None
        finally:
            self._log.settle(request.key, reserved, tokens, text)

    def _status_error(self, error: Any, request: ChatRequest) -> Exception:
        status, body = error.status_code, error.body
        message = body.get("message") if isinstance(body, dict) else None
        reason = f"HTTP {status}: {self._line(message or error.response.text or error.response.reason_phrase)}"
        if status in (408, 409, 429) or status >= 500:
            seconds = error.response.headers.get("retry-after", "")  # or a date, which is not used
            return _Retry(reason, retry_after=float(seconds) if seconds.isdigit() else None)
        if status == 400 and self._limit_name == "max_tokens" and "max_completion_tokens" in reason:
            self._limit_name = "max_completion_tokens"
            return _Retry(reason, retry_after=0.0)
        if status in (400, 413, 422):
            return Refused(f"the server refuses it: {reason}")
        remedy = {
            401: f"set {API_KEY} to a key of this server",
            403: f"set {API_KEY} to a key that may use this model",
            404: f"check model={request.model} and the address, which usually ends in /v1",
        }.get(status, "the server does not accept this request")
        return UserError(f"base_url={self._base_url}: {reason}; {remedy}")

    def _line(self, message: object) -> str:
        return self._redacted(" ".join(str(message).split()))[:200]

    def _redacted(self, text: str) -> str:
        # Servers without keys are given short words such as "none", which texts contain.
        return text.replace(self._key, "***") if len(self._key) >= _MIN_KEY_LENGTH else text


def _read_reply(reply: Any) -> tuple[str, bool, int | None]:
    """A chat completion's text, whether it is complete, and its tokens where the server counts them. Raises ValueError for anything else."""
    try:
        choice = reply.choices[0]
        text, is_complete = choice.message.content or "", choice.finish_reason != "length"
    except (AttributeError, IndexError, TypeError):
        raise ValueError(f"{str(reply)[:80]!r}") from None
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} as its content")
    used = getattr(getattr(reply, "usage", None), "total_tokens", None)
    return text, is_complete, used if isinstance(used, int) and used > 0 else None


def _is_encodable(text: str) -> bool:
    """Whether a text can be sent and written; one with half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class Translation:
    """Instruction rows, in the file's order, and the requests that translate instruction, input and output separately, each text once."""

    rows: list[dict[str, Any]]
    columns: tuple[str, ...]
    language: str
    model: str

    def request(self, text: str) -> ChatRequest:
        # A translation has at most about as many tokens as the text has bytes, also in languages with few tokens in the vocabulary.
        max_tokens = _MIN_TRANSLATION_TOKENS + len(text.encode("utf-8", "replace"))
        return ChatRequest(self.model, TRANSLATION_PROMPT.format(language=self.language), text, max_tokens)

    def requests(self) -> list[ChatRequest]:
        """One for each different text, in the rows' order. Blank texts have none and stay as they are."""
        texts = dict.fromkeys(text for row in self.rows for text in self._texts(row).values())
        return [self.request(text) for text in texts]

    def translate(self, answers: Mapping[str, str]) -> Iterator[dict[str, Any] | None]:
        """Each row with its fields translated and the others as they are; None where an answer, by the requests' keys, is missing."""
        for row in self.rows:
            translated = {name: answers.get(self.request(text).key) for name, text in self._texts(row).items()}
            yield None if None in translated.values() else {**row, **translated}

    def locate(self, request: ChatRequest) -> str:
        """Where a request's text first occurs, for messages."""
        number, name = next(
            (number, name)
            for number, row in enumerate(self.rows, 1)
            for name, text in self._texts(row).items()
            if text == request.user
        )
        return f"row {number}, {name}"

    def _texts(self, row: Mapping[str, Any]) -> dict[str, str]:
        return {name: row[name] for name in self.columns if (row.get(name) or "").strip()}


def read_translation(data_files: str | list[str], language: str, model: str, limit: int | None = None) -> Translation:
    """The first ``limit`` rows of ``data_files``, which are as for ``finch.data.rows.rows_dataset``.

    Raises UserError for files that cannot be read, rows of another format, or a row with a field that is missing or not text.
    """
    from finch.data.formats import detect  # with torchtune, which a judge does not need
    from finch.data.row_files import local_files, read_rows, source_of

    found = detect(data_files)
    if found.format != "instruction":
        raise UserError(f"data_files: the rows are {found.label}; rows to translate have instruction, input and output")
    rows: list[dict[str, Any]] = []
    for file in (files := local_files(data_files)):
        for number, row in enumerate(read_rows(file, source_of(files)), start=1):
            if limit is not None and len(rows) == limit:
                break
            for field, column in found.columns.items():
                value = row.get(column)
                problem = None
                if not isinstance(value, str) and not (value is None and field == "input"):
                    problem = "is " + ("missing" if value is None else f"{type(value).__name__}, not text")
                if problem:
                    raise UserError(
                        f"data_files={file}: row {number}: its field {column!r} {problem}; fix or remove that row"
                    )
            rows.append(row)
    return Translation(rows, tuple(found.columns.values()), language, model)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON Lines, complete or not at all."""
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
