"""Starts TorchTitan on a CPU: several runs in one process group, since importing it takes longer than most of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.tiny_job import environment
from helpers.evaluation import read_lines
from helpers.runs import ROOT


@dataclass
class TitanRun:
    """What a finished run left behind.

    Attributes:
        output: of all runs of its process group.
    """

    folder: Path
    output: str

    def lines(self) -> list[dict]:
        return read_lines(self.folder / "metrics.jsonl")

    def column(self, name: str) -> list:
        return [line[name] for line in self.lines() if "lr" in line]

    def result(self) -> dict:
        """``logged``: step and loss as TorchTitan logs them; ``rates``: of the optimizers; ``error``: what ended the run."""
        return json.loads((self.folder / "result.json").read_text())

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "weights.pt")


def rows_environment(shared_data: Path) -> dict[str, str]:
    """What ``helpers.titan_configs`` reads: stories260k and TOFU's rows."""
    return {"FINCH_TEST_BASE": f"{shared_data}/stories260k", "FINCH_TEST_ROWS": f"{shared_data}/tofu/full.jsonl"}


def start(command: list[str], shared_data: Path, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Starts a command that runs ``helpers.titan_cpu``, on stories260k and TOFU's rows."""
    return subprocess.run(
        command,
        env=environment(ROOT, ROOT / "tests", OMP_NUM_THREADS="1", **rows_environment(shared_data)),
        cwd=os.environ.get("TMPDIR", "/tmp"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_jobs(jobs: dict[int, list[dict]], folder: Path, shared_data: Path) -> None:
    """Runs the jobs of each number of ranks, see ``helpers.titan_cpu.run_job``, in ``folder / RANKS``; one import is enough for all."""
    outputs = [folder / str(ranks) / "output.txt" for ranks in jobs]
    for output, each in zip(outputs, jobs.values(), strict=True):
        output.parent.mkdir()
        output.touch()
        output.with_name("jobs.json").write_text(json.dumps(each))
    done = start([sys.executable, "-m", "helpers.titan_cpu", str(folder), *map(str, jobs)], shared_data)
    assert done.returncode == 0, done.stdout[-5000:] + "".join(output.read_text()[-5000:] for output in outputs)


def finished(jobs: list[dict], folder: Path) -> dict[str, TitanRun]:
    """The runs of jobs that are done, by name."""
    output = (folder / "output.txt").read_text()
    return {job["name"]: TitanRun(folder / job.get("folder", job["name"]), output) for job in jobs}


def job(name: str, *arguments: str, config: str = "finch", **more) -> dict:
    module = ["--module", "helpers.titan_configs", "--config", config]
    return {"name": name, "arguments": [*module, *arguments], **more}
