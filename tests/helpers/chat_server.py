"""A stand-in for a server with OpenAI's protocol, in a thread: it answers with the text in capitals, unless a test says otherwise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from helpers.runs import finch

KEY = "sk-secret-0123456789"
Reply = tuple[int, Any]  # status; an object that is sent as JSON, or bytes that are sent as they are


def completion(text: str, tokens: int = 7, finish_reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return 200, reply


def refusal(status: int, message: str) -> Reply:
    return status, {"error": {"message": message, "type": "x"}}


class ChatServer(ThreadingHTTPServer):
    """
    Attributes:
        answer: from the number of a call, from 0, and its text to a reply; None closes the connection without one.
        texts: of all calls.
        requests: their bodies.
        keys: their Authorization headers.
        most_at_once: calls.
    """

    daemon_threads = True
    answer: Callable[[int, str], Reply | None] = staticmethod(lambda _, text: completion(text.upper()))

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.texts: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    def reply_to(self, body: dict[str, Any], key: str) -> Reply | None:
        text = body["messages"][-1]["content"]
        with self._lock:
            number = len(self.texts)
            self.texts.append(text)
            self.requests.append(body)
            self.keys.append(key)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(number, text)
        finally:
            with self._lock:
                self._at_once -= 1

    def handle_error(self, *_: Any) -> None:
        """Nothing is printed where a client has gone."""


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.server.reply_to(body, self.headers["Authorization"])
        if reply is None:
            self.close_connection = True
            self.connection.close()
            return
        status, content = reply
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def finch_with_key(capsys: Any, folder: Path, *command: str, **options: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); an error is one line, and the key is in no output and no file of ``folder``."""
    code, out, err = finch(capsys, *command, **options)
    assert KEY not in out + err + "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert err.count("finch: error: ") == (code == 1), err
    return code, out, err


@contextmanager
def chat_server(monkeypatch: Any) -> Iterator[ChatServer]:
    """With a key in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = ChatServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
