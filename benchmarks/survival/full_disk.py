"""A disk that is full at a file of an export: a real file system in memory, filled when the export begins so that this file's last page has no room.

    python -m benchmarks.survival.full_disk FOLDER BYTES COMMAND ...

runs a Python command in this process and leaves BYTES free once it makes FOLDER.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.survival.cases import FINCH, Average, Case, Run, environment
from finch.base.errors import UserError
from finch.base.files import PARTIAL

SIZE, PAGE = 64 * 2**20, 4096
BALLAST = "ballast"
IS_MOUNTED = "FINCH_FULL_DISK"


def pages(size: int) -> int:
    return -(-size // PAGE)


def fill(folder: Path, free: int) -> None:
    """Leaves ``free`` bytes on the file system that holds ``folder``."""
    status = os.statvfs(folder)
    with (folder / BALLAST).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - free)


class FullDisk:
    """
    Args:
        model: the folder that is exported, below ``case.job``.
        made: the folder with which the export begins.
    """

    def __init__(self, case: Case, model: str, made: str) -> None:
        self._case, self._made = case, made
        case.reset()
        if (error := case.finish()) is not None:
            raise RuntimeError(error)
        case.keep_reference()
        self.model = case.reference / model
        self.files = sorted((path for path in self.model.iterdir()), key=lambda path: path.stat().st_mtime_ns)

    def failure(self, number: int) -> str | None:
        """What is wrong after the disk was full at file ``number``, in the order in which they are written; None: nothing."""
        case = self._case
        case.reset()
        sizes = [pages(path.stat().st_size) for path in self.files]
        free = (sum(sizes[:number]) + sizes[number] - 1) * PAGE
        words = case.command()[1:]
        program = [sys.executable, "-m", "benchmarks.survival.full_disk", self._made, str(free), *words]
        done = subprocess.run(
            program, env=environment(), cwd=case.out, capture_output=True, text=True, check=False, timeout=300
        )
        output = done.stdout + done.stderr
        if not (case.out / BALLAST).exists():
            return f"the disk was not filled: {output[-500:]}"
        (case.out / BALLAST).unlink()
        errors = re.findall(r"finch: error: .*", output)
        if done.returncode != 1 or len(errors) != 1 or "Traceback" in output:
            return f"it ended with {done.returncode} and {len(errors)} lines of error: {output[-500:]}"
        print(f"  {errors[0]}".replace(str(case.job), "JOB"), flush=True)
        exported = case.job / self.model.relative_to(case.reference)
        left = [
            path.name for path in (exported, *case.job.rglob(f"*{PARTIAL}"), *case.job.rglob(".tmp*")) if path.exists()
        ]
        problem = f"{left[0]} is left" if left else case.wrong(case.said(output.encode()))
        return problem or case.finish() or next(iter(case.differences()), None)


def main(out: Path) -> list[str]:
    """Prints a line for each file; returns the failures."""
    if IS_MOUNTED not in os.environ:
        unshare = shutil.which("unshare")
        if unshare is None:
            raise UserError(
                "full-disk mounts a file system of its own with unshare, which is not installed (util-linux)"
            )
        command = [unshare, "--map-root-user", "--mount", sys.executable, "-m", "benchmarks.survival", "full-disk"]
        os.execve(unshare, command, {**os.environ, IS_MOUNTED: "1"})
    out.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(out)], check=True)
    torch.set_num_threads(1)  # as in the commands: sums are rounded in the same order
    failures = []
    for case, model, made in (
        (Run(out), "run/epoch_0", f"epoch_0{PARTIAL}"),
        (Run(out / "last"), "run/epoch_1", f"epoch_1{PARTIAL}"),
        (Average(out), "run/average/model", "partial"),
    ):
        disk = FullDisk(case, model, made)
        for number, path in enumerate(disk.files):
            problem = disk.failure(number)
            failures += [] if problem is None else [f"full disk at {model}/{path.name}: {problem}"]
        print(f"full disk at each of {len(disk.files)} files of {model}: {len(failures)} failures so far", flush=True)
    return failures


def _run_on_full_disk(made: str, free: int, words: list[str]) -> None:
    mkdir = Path.mkdir

    def fills(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if path.name == made and not Path(BALLAST).exists():
            fill(Path(), free)

    Path.mkdir = fills  # type: ignore[assignment, method-assign]
    is_module = words[:2] == list(FINCH[1:])
    sys.argv = words[1:] if is_module else words
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run_on_full_disk(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
