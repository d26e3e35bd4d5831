"""`finch doctor --gpu`: does this machine compute a training step right?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finch.base.errors import UserError, writing
from finch.base.extras import require_extras

_CPU_RANKS, _MAX_RANKS = 2, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares the shipped config's losses and memory, attention, training steps, whole runs, ranks and objectives on this machine's GPUs with "
        "one rank, the estimate, float64 or the CPU, and measures rates. Needs no weights and no network; at most nine minutes. Exit code 1 if a "
        "line fails."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases, at most two and a half minutes")
    add("--cpu", action="store_true", help="tiny models on the CPU with gloo; tests the check itself")
    text = "folder for gpu_check.json and gpu_check.md (default: .)"
    add("--out", type=Path, default=Path(), metavar="DIR", help=text)


def main(parsed: argparse.Namespace) -> None:
    """Runs the phases; ends the process with 1 if a line has failed.

    Raises:
        UserError: there is no GPU, or ``--out`` cannot be written.
    """
    require_extras("finch doctor --gpu", "torchtune")
    import torch

    from finch.plan.gpu_check.phases import run_phases

    number = torch.cuda.device_count()
    if not parsed.cpu and not number:
        raise UserError("finch doctor --gpu finds no GPU (torch.cuda sees 0): add --cpu for tiny models on the CPU")
    with writing(f"--out {parsed.out}"):
        parsed.out.mkdir(parents=True, exist_ok=True)
    device, ranks = ("cpu", _CPU_RANKS) if parsed.cpu else ("cuda", min(number, _MAX_RANKS))
    sys.exit(not run_phases(parsed.out / "gpu_check", device=device, ranks=ranks, quick=parsed.quick))
