"""A stand-in for the Hugging Face hub, in a thread: the part of its API that downloads of models and rows use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
from huggingface_hub import constants

TOKEN = "hf_0123456789abcdefghij"
_REFUSALS = {
    "unknown": (404, {"X-Error-Code": "RepoNotFound"}),
    "gated": (403, {"X-Error-Code": "GatedRepo"}),
    "revision": (404, {"X-Error-Code": "RevisionNotFound"}),
    "token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "entry": (404, {"X-Error-Code": "EntryNotFound"}),
    "down": (503, {}),
}


class HubServer(ThreadingHTTPServer):
    """
    Attributes:
        commits: of each repository, ``models/OWNER/NAME`` or ``datasets/OWNER/NAME``, the files by path, by commit and by ``main``.
        gated: repositories that need ``TOKEN``.
        refusal: of every request: a key of ``_REFUSALS``, or None.
        cuts: how many times a file's content is cut off in its middle.
        awaited: how many processes ask for a large file before its content is sent.
        requests: method and path of each.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.refusal: str | None = None
        self.cuts = self.awaited = 0
        self.requests: list[str] = []

    def add(self, repository: str, files: Mapping[str, bytes] | Path) -> str:
        """Makes a commit, which becomes ``main``; returns its hash."""
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        commits = self.commits.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[commit] = commits["main"] = dict(files)
        return commit

    def main(self, repository: str) -> str:
        """The newest commit of a repository."""
        return [commit for commit in self.commits[repository] if commit != "main"][-1]

    def downloads(self, name: str) -> int:
        """How often a file's content was asked for."""
        return sum(request.startswith("GET ") and request.endswith(f"/{name}") for request in self.requests)

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is none of the test's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.refusal:
            return self._refuse(self.server.refusal)
        if match := re.fullmatch(
            r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+|refs/.+?))?/?(.*)", path
        ):
            repository, what, revision, rest = match.groups()
        elif match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository, what, revision, rest = f"{match[1] or 'models'}/{match[2]}", "resolve", match[3], match[4]
        else:
            return self._refuse("entry")
        commits = self.server.commits.get(repository)
        if commits is None:
            return self._refuse("unknown")
        if repository in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse("gated")
        files = commits.get(revision or "main")
        if files is None:
            return self._refuse("revision")
        commit = next(commit for commit, content in commits.items() if commit != "main" and content == files)
        if what == "resolve":
            return self._send_file(files.get(rest), commit)
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        if what == "paths-info":
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
            return self._send_json([entry for entry in entries if entry["path"] in asked])
        if what == "tree":
            return self._send_json(entries)
        siblings = [{"rfilename": name} for name in files]
        return self._send_json({"id": repository.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []})

    do_HEAD = do_POST = do_GET

    def _send_file(self, content: bytes | None, commit: str) -> None:
        if content is None:
            return self._refuse("entry")
        etag = hashlib.sha1(content).hexdigest()
        self.send_response(200)
        for name, value in (("ETag", f'"{etag}"'), ("X-Repo-Commit", commit), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        is_large = len(content) > 10_000
        while (
            is_large and sum(request == f"HEAD {self.path}" for request in self.server.requests) < self.server.awaited
        ):
            time.sleep(0.01)
        if self.server.cuts and is_large:
            self.server.cuts -= 1
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return self.connection.close()
        self.wfile.write(content)
        return None

    def _send_json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, why: str) -> None:
        status, headers = _REFUSALS[why]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub_server(monkeypatch: Any, cache: Path) -> Iterator[HubServer]:
    """This process's hub, with an empty cache."""
    server = HubServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    use_hub(monkeypatch, server.url, cache)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        huggingface_hub.close_session()


def use_hub(monkeypatch: Any, url: str, cache: Path) -> None:
    """The library reads the environment when it is imported."""
    for name, value in (
        ("ENDPOINT", url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"),
        ("HF_HUB_CACHE", str(cache / "hub")),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(constants, name, value)
    for name, value in (("HF_ENDPOINT", url), ("HF_HUB_OFFLINE", False), ("HF_DATASETS_CACHE", cache / "datasets")):
        monkeypatch.setattr(datasets.config, name, value)
