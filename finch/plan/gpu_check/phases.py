"""The phases, and the loop that runs each in a process of its own and writes the report after each."""

from __future__ import annotations

import os
import pkgutil
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch import __version__
from finch.base.extras import version
from finch.distributed.processes import num_cores
from finch.plan.gpu_check.processes import Ranks, stacks_in
from finch.plan.gpu_check.report import (
    FAILED,
    MEASURED,
    NOT_RUN,
    OK,
    Check,
    Line,
    PhaseReport,
    read_lines,
    summary,
    write,
)

_CPU_PATIENCE = 4.0  # a CPU's deadlines are for machines that do other work as well
_PACKAGES = ("torch", "torchtune", "torchao", "transformers", "trl", "triton", "flash-attn", "nvidia-nccl-cu12")
_MARGIN_S = 3.0  # before its deadline a phase starts no further case


@dataclass(frozen=True)
class Phase:
    """A phase; ``target`` is ``"module:function"``, called with a :class:`finch.plan.gpu_check.report.Check`. Deadlines in seconds."""

    number: int
    title: str
    target: str
    deadline_s: float
    quick_deadline_s: float
    min_ranks: int = 1

    @property
    def decides(self) -> bool:
        """Whether a failed line fails the check: speed does not."""
        return 1 <= self.number <= 5


PHASES = (
    Phase(0, "machine", "finch.plan.gpu_check.machine:run", 30, 15),
    Phase(1, "attention", "finch.plan.gpu_check.attention:run", 60, 18),
    Phase(2, "one training step", "finch.plan.gpu_check.step:run", 120, 30),
    Phase(3, "objectives", "finch.plan.gpu_check.objectives:run", 60, 20),
    Phase(4, "runs", "finch.plan.gpu_check.runs:run", 80, 24),
    Phase(5, "ranks", "finch.plan.gpu_check.meshes:run", 100, 28, min_ranks=2),
    Phase(6, "speed", "finch.plan.gpu_check.speed:run", 150, 45),
)
"""Their deadlines add up to ten minutes, and to three with ``--quick``."""


def run_phases(out: Path, *, device: str, ranks: int, quick: bool, phases: Sequence[Phase] = PHASES) -> bool:
    """Runs the phases in order and writes ``out`` after each; returns whether none that decides has failed.

    A phase that is over its deadline is ended, with its stacks in the report. After Ctrl-C the files hold what was done.
    """
    if device == "cpu":  # threads would wait for each other longer than tiny products take
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine, reports = describe_machine(device, ranks, quick), list[PhaseReport]()
    with tempfile.TemporaryDirectory(prefix="finch_gpu_check_") as name:
        for phase in phases:
            folder = Path(name) / str(phase.number)
            folder.mkdir()
            deadline_s = phase.quick_deadline_s if quick else phase.deadline_s
            deadline_s *= _CPU_PATIENCE if device == "cpu" else 1
            reports.append(PhaseReport(phase.number, phase.title, "interrupted", 0.0, deadline_s, []))
            try:
                _run(phase, reports[-1], folder, device=device, ranks=ranks, quick=quick)
            finally:
                reports[-1].lines = read_lines(folder) + reports[-1].lines
                write(out, machine, reports)
            print(summary(reports[-1]), flush=True)
    return not any(report.status == FAILED for report, phase in zip(reports, phases, strict=True) if phase.decides)


def _run(phase: Phase, report: PhaseReport, folder: Path, **options: Any) -> None:
    if options["ranks"] < phase.min_ranks:
        report.status = NOT_RUN
        report.lines = [Line(phase.title, NOT_RUN, note=f"needs {phase.min_ranks} GPUs, this machine has one")]
        return
    start = time.time()
    end = start + report.deadline_s
    settings = {**options, "folder": str(folder), "end": end - _MARGIN_S}
    arguments = {"target": phase.target, "settings": settings}
    running = Ranks("phase", f"{__name__}:run_phase", arguments, folder, leads=True)
    note = ""
    try:
        if not running.wait(end):
            running.abort()
            report.stacks = stacks_in(folder)
            note = f"ended at its deadline of {report.deadline_s:.0f} s; the stacks are below"
        elif running.codes != [0]:
            note = f"exit code {running.codes[0]}: {running.last_lines()}"
    finally:
        running.kill()
        report.seconds = time.time() - start
    if note:
        report.lines = [Line(phase.title, FAILED, note=note)]
    statuses = {line.status for line in (*read_lines(folder), *report.lines)}
    report.status = next((status for status in (FAILED, OK, MEASURED) if status in statuses), NOT_RUN)


def run_phase(target: str, settings: dict[str, Any]) -> None:
    """A phase in its process."""
    pkgutil.resolve_name(target)(Check(**{**settings, "folder": Path(settings["folder"])}))


def describe_machine(device: str, ranks: int, quick: bool) -> dict[str, Any]:
    """What the numbers belong to. Creates no CUDA context."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    versions = [f"{name} {version(name)}" for name in _PACKAGES if version(name)]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "mode": f"{device}{', --quick' if quick else ''}, {ranks} rank{'s' if ranks > 1 else ''}",
        "GPUs (name, memory, driver)": "; ".join(gpus) or "none",
        "CPU": f"{platform.processor() or platform.machine()}, {num_cores()} cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}, CUDA {torch.version.cuda}",
        "packages": f"finch {__version__}, " + ", ".join(versions),
    }
