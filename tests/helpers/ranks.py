"""Ranks with gloo for the tests: forked by one server per test session, which has imported everything, or started by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_job import ROOT, environment


class RankServer:
    """The process of ``helpers.rank_server``. A rank that hangs or dies ends with its job, and the next job has new ranks."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "helpers.rank_server"]
        paths = [ROOT, ROOT / "recipes", ROOT / "tests"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment(*paths), **pipes)

    def run(self, ranks: int, argv: list[str], folder: Path, timeout: float = 600) -> tuple[list[int], str]:
        """Runs a recipe or a file on ranks in ``folder``; returns their exit codes and their output.

        Args:
            argv: a recipe's module, or a file that ends in .py, and its arguments.
            timeout: in seconds, for ranks that hang; the test then fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / "output.txt"
        output.write_text("")
        job = {"ranks": ranks, "argv": argv, "folder": str(folder), "output": str(output), "timeout": timeout}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({**job, "environment": environment()}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        text = output.read_text(errors="replace")
        if answer["timed_out"]:
            pytest.fail(f"not done after {timeout} s: {text[-3000:]}")
        return answer["codes"], text

    def close(self) -> None:
        self.process.communicate()


_servers: list[RankServer] = []


def rank_server() -> RankServer:
    """This test session's, started when it is first needed."""
    if not _servers or _servers[-1].process.poll() is not None:
        _servers.append(RankServer())
    return _servers[-1]


def close_rank_servers() -> None:
    """At the end of the session; ``helpers.rank_server`` also ends with the process that started it."""
    while _servers:
        _servers.pop().close()


def on_ranks(ranks: int, code: str, folder: Path, timeout: float = 600) -> list[Any]:
    """Runs ``code`` on every rank; it sees ``device``, ``folder`` and calls ``tell(value)`` once. Returns the values in rank order."""
    prologue = """
        import json, os, sys, torch
        from pathlib import Path
        folder = Path(sys.argv[1])
        device = torch.device("cpu")
        def tell(value):
            (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(value))
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "on_ranks.py"
    file.write_text(textwrap.dedent(prologue) + textwrap.dedent(code))
    codes, output = rank_server().run(ranks, [str(file), str(folder)], folder, timeout)
    assert codes == [0] * ranks, output[-3000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
