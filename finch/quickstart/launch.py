"""Runs `tune run` in a subprocess."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from finch.errors import UserError


def tune_run(config: str, output: Path, *overrides: str) -> None:
    """``tune run finch_full_finetune --config CONFIG output_dir=OUTPUT ...``, with stdout and stderr in OUTPUT.log.

    Raises:
        UserError: the run failed; with the last lines of its log.
    """
    command = ["run", "finch_full_finetune", "--config", config, f"output_dir={output}", "overwrite=True", *overrides]
    print("  tune " + " ".join(command), flush=True)
    log = output.with_name(output.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.call(
            [sys.executable, "-m", "torchtune._cli.tune", *command], stdout=file, stderr=subprocess.STDOUT
        )
    if code != 0:
        last_lines = log.read_text(encoding="utf-8").strip().splitlines()[-5:]
        raise UserError(f"tune run failed with code {code}; {log} ends with: " + " | ".join(last_lines))
