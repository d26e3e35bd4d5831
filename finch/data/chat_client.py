"""Answers of a language model behind any server with OpenAI's protocol: recorded, within a budget of tokens, retried."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from finch.data.request_log import RequestLog
from finch.errors import UserError

API_KEY = "OPENAI_API_KEY"
MAX_TRIES = 8
MAX_WRONG_TRIES = 3
MAX_FIRST_TRIES = 3
"""Of a server that has not answered before."""
MAX_DELAY_S = 60.0
# Of a request, in tokens, beyond its text: a chat template's. A byte-level tokenizer makes at most one token of each byte.
_OVERHEAD_TOKENS = 64
_RETRIED_STATUS = (408, 409, 429)
_MIN_KEY_LENGTH = 8


@dataclass(frozen=True)
class ChatRequest:
    """One question to a model.

    Attributes:
        model: its name on the server.
        system: the instruction.
        user: the text.
        max_tokens: of the answer.
    """

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
        """At most that many tokens the call takes, prompt and answer."""
        return len((self.system + self.user).encode("utf-8", "replace")) + _OVERHEAD_TOKENS + self.max_tokens


class BudgetSpent(UserError):
    """The next call does not fit into what is left of the budget."""


class WrongAnswer(Exception):
    """The server's answers to one request are of no use; the message says why."""


class ChatClient:
    """
    Args:
        base_url: of the server, usually ending in ``/v1``.
        log: of the calls; a request that it has an answer of is not sent again.
        timeout: of a call, in seconds.
        first_delay: before the second try, in seconds; it doubles from try to try.

    Raises:
        UserError: the address is not one, or the environment has no key.
    """

    def __init__(self, base_url: str, log: RequestLog, *, timeout: float = 120.0, first_delay: float = 1.0) -> None:
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
        self._openai, self._base_url, self._key, self._log, self._first_delay = openai, base_url, key, log, first_delay
        try:
            self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=0)
        except Exception as error:  # httpx's error classes for addresses are private to its versions
            raise UserError(f"base_url={base_url} is not an address ({self._line(error)}); correct it") from None
        self._stop = threading.Event()
        self._has_answered = False

    def complete_all(
        self, requests: Iterable[ChatRequest], concurrency: int = 4
    ) -> Iterator[tuple[ChatRequest, str | WrongAnswer]]:
        """Yields requests with their answers in the order in which they come.

        After an error no further call is made, those in flight are waited for and recorded, then it is raised.

        Args:
            concurrency: calls at a time.

        Raises:
            UserError: the server cannot be reached, refuses the key, model or request, or gave no answer after ``MAX_TRIES``.
            BudgetSpent: see there.
        """
        results: queue.SimpleQueue[tuple[ChatRequest, str | Exception] | None] = queue.SimpleQueue()
        source, lock = iter(requests), threading.Lock()
        self._stop.clear()

        def work() -> None:
            while not self._stop.is_set():
                with lock:
                    request = next(source, None)
                if request is None:
                    break
                try:
                    results.put((request, self.complete(request)))
                except WrongAnswer as error:
                    results.put((request, error))
                except Exception as error:
                    self._stop.set()
                    results.put((request, error))
            results.put(None)

        for _ in range(concurrency):
            threading.Thread(target=work, daemon=True).start()
        failure: Exception | None = None
        running = concurrency
        try:
            while running:
                result = results.get()
                if result is None:
                    running -= 1
                elif isinstance(result[1], (str, WrongAnswer)):
                    yield result[0], result[1]
                elif not isinstance(result[1], _Stopped):
                    failure = failure or result[1]
        finally:
            self._stop.set()
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Makes ``complete_all`` end: no further call is made, those in flight are waited for."""
        self._stop.set()

    def complete(self, request: ChatRequest) -> str:
        """The answer to one request.

        Raises:
            UserError: as for ``complete_all``.
            WrongAnswer: empty or cut off, ``MAX_WRONG_TRIES`` times.
        """
        if (answer := self._log.answers.get(request.key)) is not None:
            return answer
        delay, num_wrong = 0.0, 0
        for number in range(1, MAX_TRIES + 1):
            if self._stop.wait(delay):
                raise _Stopped
            try:
                return self._try(request)
            except WrongAnswer:
                delay, num_wrong = 0.0, num_wrong + 1
                if num_wrong == MAX_WRONG_TRIES:
                    raise
            except _Retry as error:
                if number == MAX_TRIES or (number == MAX_FIRST_TRIES and error.is_no_server and not self._has_answered):
                    raise UserError(
                        f"base_url={self._base_url}: no answer after {number} tries ({error}); check the server and its address, then start the "
                        f"same command again: the answers so far are kept in {self._log.path}"
                    ) from None
                delay = self._first_delay * 2 ** (number - 1) * random.uniform(0.75, 1.0)
                delay = min(delay if error.retry_after is None else error.retry_after, MAX_DELAY_S)
        raise AssertionError

    def _try(self, request: ChatRequest) -> str:
        reserved = request.token_limit
        if not self._log.reserve(request.key, reserved):
            raise BudgetSpent(
                f"the budget of {self._log.budget:,} tokens is spent: {self._log.tokens:,} are taken, and the next call may take {reserved:,}; "
                "raise the budget and start the same command again"
            )
        tokens, text = reserved, None  # what a call costs whose end is not known
        try:
            reply = self._client.chat.completions.create(
                model=request.model,
                messages=request.messages,  # type: ignore[arg-type]
                max_tokens=request.max_tokens,
                temperature=0.0,
            )
            answer, is_complete, used = _read_reply(reply)
            tokens = reserved if used is None else used
            self._has_answered = True
            if not answer.strip():
                raise WrongAnswer("the answer is empty")
            if not is_complete:
                raise WrongAnswer(f"the answer was cut off at {request.max_tokens} tokens")
            if not is_encodable(answer):
                raise WrongAnswer("the answer has halves of surrogate pairs, which are no characters")
            text = self._redacted(answer.strip())
            return text
        except self._openai.APIStatusError as error:
            tokens = 0
            raise self._status_error(error, request) from None
        except self._openai.APITimeoutError:
            raise _Retry("it took longer than the timeout") from None
        except self._openai.APIConnectionError as error:
            is_refused = type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")
            tokens = 0 if is_refused else reserved
            raise _Retry(self._line(error.__cause__ or error), is_no_server=is_refused) from None
        except (self._openai.APIError, ValueError) as error:  # ValueError: broken JSON
            raise _Retry(f"its answer is not a chat completion: {self._line(error)}", is_no_server=True) from None
        finally:
            self._log.settle(request.key, reserved, tokens, text)

    def _status_error(self, error: Any, request: ChatRequest) -> Exception:
        status, body = error.status_code, error.body
        message = body.get("message") if isinstance(body, dict) else None
        reason = f"HTTP {status}: {self._line(message or error.response.text or error.response.reason_phrase)}"
        if status in _RETRIED_STATUS or status >= 500:
            return _Retry(reason, retry_after=_seconds(error.response.headers.get("retry-after")))
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


class _Retry(Exception):
    """A try that failed and may succeed later.

    Attributes:
        retry_after: when, in seconds; None: the server does not say.
        is_no_server: whether there may be no server of this kind at the address.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, is_no_server: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.is_no_server = retry_after, is_no_server


class _Stopped(Exception):
    """Another request has ended the work."""


def _read_reply(reply: Any) -> tuple[str, bool, int | None]:
    """The text of a chat completion, whether it is complete, and the tokens of prompt and answer where the server counts them.

    Raises:
        ValueError: it is something else.
    """
    try:
        choice = reply.choices[0]
        text, is_complete = choice.message.content or "", choice.finish_reason != "length"
    except (AttributeError, IndexError, TypeError):
        raise ValueError(f"{str(reply)[:80]!r}") from None
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} as its content")
    used = getattr(getattr(reply, "usage", None), "total_tokens", None)
    return text, is_complete, used if isinstance(used, int) and used > 0 else None


def is_encodable(text: str) -> bool:
    """Whether a text can be sent and written; one with half of a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None  # a date
