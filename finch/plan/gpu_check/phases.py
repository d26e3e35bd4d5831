"""The phases, and the loop that runs each in a process of its own and writes the report after each."""

from __future__ import annotations

import os
import pkgutil
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from finch import __version__
from finch.base.errors import UserError
from finch.base.extras import version
from finch.distributed.processes import num_cores
from finch.plan.gpu_check.processes import Ranks, stacks_in
from finch.plan.gpu_check.report import FAILED, LATE, MEASURED, NOT_QUICK, NOT_RUN, OK, Check, PhaseReport, write

_CPU_PATIENCE = 4.0  # a CPU's deadlines are for machines that do other work as well
_PACKAGES = ("torch", "torchtune", "torchao", "transformers", "trl", "triton", "flash-attn", "nvidia-nccl-cu12")
_MARGIN_S = 3.0  # before its deadline a phase starts no further case


class Phase(NamedTuple):
    """A phase; ``target`` is ``"module:function"``, called with a :class:`finch.plan.gpu_check.report.Check`. Deadlines in seconds; a quick check
    leaves out what has 0."""

    title: str
    target: str
    deadline_s: float
    quick_deadline_s: float


PHASES = (
    Phase("machine", "finch.plan.gpu_check.machine:run", 20, 15),
    Phase("the shipped config", "finch.plan.gpu_check.shipped:run", 120, 0),
    Phase("attention", "finch.plan.gpu_check.attention:run", 60, 25),
    Phase("one training step", "finch.plan.gpu_check.step:run", 110, 35),
    Phase("runs", "finch.plan.gpu_check.runs:run", 60, 24),
    Phase("ranks", "finch.plan.gpu_check.meshes:run", 60, 28),
    Phase("a killed rank", "finch.plan.gpu_check.meshes:kill_a_rank", 60, 0),
    Phase("objectives", "finch.plan.gpu_check.objectives:run", 50, 20),
)
"""What says most of a new machine comes first. The deadlines add up to nine minutes, and to two and a half with ``--quick``."""


def run_phases(out: Path, *, device: str, ranks: int, quick: bool, phases: Sequence[Phase] = PHASES) -> bool:
    """Runs the phases in order and writes ``out`` with .json and .md after each; returns whether nothing has failed.

    A phase that is over its deadline is ended, with its stacks in the report, and what it had not seen yet is not run: no machine is wrong because
    it is slow. After Ctrl-C the files hold what was done.
    """
    if device == "cpu":  # threads would wait for each other longer than tiny products take
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine, reports = describe_machine(device, ranks, quick), list[PhaseReport]()
    with tempfile.TemporaryDirectory(prefix="finch_gpu_check_") as name:
        for number, phase in enumerate(phases):
            start, folder = time.time(), Path(name) / str(number)
            folder.mkdir()
            deadline_s = phase.quick_deadline_s if quick else phase.deadline_s
            report = PhaseReport(number, phase.title, deadline_s * (_CPU_PATIENCE if device == "cpu" else 1))
            reports.append(report)
            check = Check(device, folder, ranks, quick, start + report.deadline_s)
            try:
                with check.case(phase.title):
                    if deadline_s:
                        _run(phase, check)
                    else:
                        check.not_run(phase.title, NOT_QUICK)
                statuses = {line.status for line in check.all_lines()}
                report.status = next((status for status in (FAILED, OK, MEASURED) if status in statuses), NOT_RUN)
            finally:
                report.seconds, report.lines, report.stacks = time.time() - start, check.all_lines(), stacks_in(folder)
                write(out, machine, reports)
            print(report, flush=True)
    print(f"{out}.json\n{out}.md")
    return all(report.status != FAILED for report in reports)


def _run(phase: Phase, check: Check) -> None:
    settings = {**asdict(check), "folder": str(check.folder), "end": check.end - _MARGIN_S}
    arguments = {"target": phase.target, "settings": settings}
    running = Ranks("phase", f"{__name__}:run_phase", arguments, check.folder, leads=True)
    if not running.wait(check.end):
        check.not_run(f"{phase.title}: the rest", f"{LATE}; the stacks are below")
    elif any(running.codes):
        raise UserError(f"exit code {running.codes[0]}: {running.last_lines()}")


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
