"""Starts a function on several ranks: the real torchrun with gloo, each rank a process of its own."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

from benchmarks.tiny_job import ROOT, environment, torchrun


def on_ranks(ranks: int, code: str, folder: Path, timeout: int = 120) -> list:
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
    # Left at once: what libraries' threads do while the interpreter ends is not under test.
    epilogue = "\nsys.stdout.flush()\nos._exit(0)\n"
    file.write_text(textwrap.dedent(prologue) + textwrap.dedent(code) + epilogue)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = subprocess.Popen(torchrun(ranks, str(file), str(folder)), env=environment(ROOT, ROOT / "tests"), **pipes)
    try:
        output, _ = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # torchrun then ends its workers, which a kill would leave behind
        output, _ = launcher.communicate(timeout=60)
        pytest.fail(f"not done after {timeout} s: {output[-3000:]}")
    assert launcher.returncode == 0, output[-3000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
