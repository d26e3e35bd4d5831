"""`finch sweep --slurm`: submits a sweep as a job array."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from finch.errors import UserError
from finch.sweep.grid import Grid
from finch.sweep.job import Job


def submit_sweep(grid: Grid, jobs: Sequence[Job], options: Sequence[str], args: argparse.Namespace) -> None:
    """
    Raises:
        UserError: always, for now.
    """
    raise UserError("--slurm is not written yet; leave it out")
