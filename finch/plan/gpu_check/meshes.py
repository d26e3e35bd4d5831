"""Phase 5: the same steps on one rank and on several, over meshes; an asynchronous save, and a rank that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finch.distributed.parallel import local_device
from finch.plan.gpu_check.models import BATCH, TINY, initial_weights, random_rows, read_config, step_config, write_base
from finch.plan.gpu_check.objectives import GRADIENT_LIMIT, LOSS_LIMIT, SGD
from finch.plan.gpu_check.processes import Ranks, environment_of, free_port
from finch.plan.gpu_check.report import Check
from finch.plan.gpu_check.runs import compare_resumed, job, kill_hook, train
from finch.plan.gpu_check.step import Step, worst_error

RANK_TARGET = f"{__name__}:steps_on_rank"
"""What runs on each rank; the tests of the check plant a defect there."""
_STEPS = 3
_PLAN = {"_component_": "finch.models.qwen3.qwen3_tp_plan"}
MESHES: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "HSDP, 2 copies": {"data_parallel_replicate_dim": 2},
    "tensor parallelism": {"tensor_parallel_dim": 2, "tensor_parallel_plan": _PLAN},
    "CPU offload": {"fsdp_cpu_offload": True},
    "no resharding": {"fsdp_reshard_after_forward": False},
    "2 micro-batches": {"gradient_accumulation_steps": 2},
}


def run(check: Check) -> None:
    ranks = 1 << (check.ranks.bit_length() - 1)  # rows are dealt evenly to a power of two
    with check.case(f"{ranks} ranks"):
        _compare_meshes(check, ranks)
    if check.quick:
        check.not_run("a killed rank", "not with --quick: starting and ending a launcher takes too long")
        return
    with check.case("a killed rank"):
        _kill_a_rank(check, ranks)


def _compare_meshes(check: Check, ranks: int) -> None:
    folders: list[Path] = []
    options = {**SGD, "dtype": "fp32", "device": check.device}
    for number, changes in enumerate(MESHES.values()):
        folders.append(check.folder / f"mesh_{number}")
        folders[-1].mkdir()
        shares = ranks // changes.get("tensor_parallel_dim", 1) * changes.get("gradient_accumulation_steps", 1)
        step_config(folders[-1], TINY["Q"], **options, batch_size=BATCH // shares, **changes)
    arguments = {"folders": list(map(str, folders)), "ports": [free_port() for _ in folders], "device": check.device}
    running = Ranks("rank", RANK_TARGET, arguments, check.folder, ranks=ranks)
    cfg = step_config(check.folder, TINY["Q"], **options)
    expected = _take_steps(Step(cfg, initial_weights(TINY["Q"]), torch.device(check.device)))
    if not running.wait(check.end):
        running.kill()
    for name, folder in zip(MESHES, folders, strict=True):
        name = f"{ranks} ranks, {name}"
        if not (folder / "seen.pt").exists():
            check.equal(name, f"no gradients: {running.last_lines()}", "gradients")
            continue
        seen = torch.load(folder / "seen.pt")
        for key, limit in (("loss", LOSS_LIMIT), ("grad_norm", GRADIENT_LIMIT)):
            steps = zip(seen["steps"], expected["steps"], strict=True)
            error = max(abs(one[key] - other[key]) / other[key] for one, other in steps)
            check.at_most(f"{name}: {key} of {_STEPS} steps", error, limit)
        error, worst = worst_error(seen["gradients"], expected["gradients"])
        check.at_most(f"{name}: gradients of the last", error, GRADIENT_LIMIT, note=f"worst of {worst}")


def steps_on_rank(folders: list[str], ports: list[int], device: str) -> None:
    """On each rank: the steps of each mesh in turn; rank 0 writes what it has seen."""
    for folder, port in zip(folders, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        step = Step(read_config(f"{folder}/config.yaml"), initial_weights(TINY["Q"]), local_device(device))
        seen = _take_steps(step)
        if step.parallel.is_rank_zero:
            torch.save(seen, Path(folder) / "seen.pt")


def _take_steps(step: Step) -> dict[str, Any]:
    rows = random_rows(TINY["Q"].sizes["vocab_size"], BATCH * _STEPS)
    steps = [step.take(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    step.close()
    return {"steps": steps, "gradients": step.gradients}


def _kill_a_rank(check: Check, ranks: int) -> None:
    """The launcher must end the others soon, and the run go on from its last asynchronous save, here on one rank."""
    write_base(check.folder, TINY["Q"])
    config = job(check, "killed", ranks=ranks, **kill_hook(rank=1))
    command = [sys.executable, "-P", "-m", "finch.cli", "run", "--nproc_per_node", str(ranks), "--config", config]
    with (check.folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment_of())
    train(job(check, "straight"))
    try:
        code = launcher.wait(max(1.0, check.end - time.time()))
    except subprocess.TimeoutExpired:
        code = 0
    name = "a killed rank: the launcher ends with an error"
    check.equal(name, code != 0, True, note=f"exit code {code}" if code else "it has not ended")
    compare_resumed(check, f"a killed rank of {ranks}, resumed on one against a run on one", is_exact=False)
