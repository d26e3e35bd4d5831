"""Forks the ranks of jobs from a process that has imported everything, in torchrun's place; see ``helpers.ranks``.

It reads one job per line from stdin, as JSON, and writes the exit codes of the job's ranks to stdout. Importing takes a rank longer than
most runs of the tests. A fork of a process that has only imported starts from the same state each time, so that no job sees another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

IMPORTED = ("finch_full_finetune", "finch_lora_finetune", "torchtune.models", "transformers")
POLL_S = 0.02
GRACE_S = 30.0  # torchrun's, from SIGTERM to SIGKILL


def serve() -> None:
    from finch.distributed.processes import die_with_parent
    from finch.training import summary

    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    summary.update_loss_figure = lambda run: None  # takes longer than most runs
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The exit codes of a job's ranks. As under torchrun, the first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = {start(job, rank, port): rank for rank in range(job["ranks"])}
    codes: dict[int, int] = {}
    end, kill_at, timed_out = time.monotonic() + job["timeout"], None, False
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            codes[running.pop(process)] = code = os.waitstatus_to_exitcode(status)
            kill_group(process, signal.SIGKILL)  # its data-loader workers
            if code != 0 and kill_at is None:
                kill_at = time.monotonic() + GRACE_S
                for other in running:
                    kill_group(other, signal.SIGTERM, only_leader=True)
            continue
        timed_out = timed_out or time.monotonic() > end
        if timed_out or (kill_at is not None and time.monotonic() > kill_at):
            for other in running:
                kill_group(other, signal.SIGKILL)
        time.sleep(POLL_S)
    return {"codes": [codes[rank] for rank in range(job["ranks"])], "timed_out": timed_out}


def start(job: dict[str, Any], rank: int, port: int) -> int:
    """Forks a rank, which leads a process group; returns its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = run_rank(job, rank, port)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def kill_group(process: int, number: int, only_leader: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number) if only_leader else os.killpg(process, number)


def run_rank(job: dict[str, Any], rank: int, port: int) -> int:
    from finch.distributed.processes import die_with_parent

    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(job["environment"], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests")
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), GROUP_RANK="0")
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["ranks"])))
    die_with_parent()
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    random.seed()
    sys.argv = job["argv"]
    try:
        if Path(sys.argv[0]).suffix == ".py":
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            importlib.import_module(sys.argv[0]).recipe_main()
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve()
