"""Phases 5 and 6: the same steps on one rank and on several, over meshes; an asynchronous save, and a rank that is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finch.config.parser import read
from finch.distributed import parallel
from finch.plan.gpu_check.models import BATCH, TINY, random_rows, step_config, write_base, write_config
from finch.plan.gpu_check.objectives import GRADIENT_LIMIT, LOSS_LIMIT, SGD
from finch.plan.gpu_check.plain_model import worst_loss
from finch.plan.gpu_check.processes import Ranks, free_port, power_of_two
from finch.plan.gpu_check.report import LATE, Check
from finch.plan.gpu_check.runs import compare_resumed, job, kill_hook, train
from finch.plan.gpu_check.step import Step, worst_error

RANK_TARGET = f"{__name__}:steps_on_rank"
"""What runs on each rank; the tests of the check plant a defect there."""
_MODEL, _STEPS = TINY["Q"], 3
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
    _on_several(check, "ranks", _compare_meshes)


def kill_a_rank(check: Check) -> None:
    _on_several(check, "a killed rank", _kill_a_rank)


def _on_several(check: Check, name: str, compare: Callable[[Check, int], None]) -> None:
    if (ranks := power_of_two(check.ranks)) == 1:
        check.not_run(name, "needs 2 GPUs, this machine has one")
        return
    with check.case(name):
        compare(check, ranks)


def _compare_meshes(check: Check, ranks: int) -> None:
    folders = {name: check.folder / f"mesh_{number}" for number, name in enumerate(MESHES)}
    options = {**SGD, "dtype": "fp32", "device": check.device}
    for name, changes in MESHES.items():
        folders[name].mkdir()
        shares = ranks // changes.get("tensor_parallel_dim", 1) * changes.get("gradient_accumulation_steps", 1)
        write_config(folders[name], _MODEL, **{**options, **changes, "batch_size": BATCH // shares})
    arguments = {"folders": {str(folder): free_port() for folder in folders.values()}}
    running = Ranks("rank", RANK_TARGET, arguments, check.folder, ranks=ranks)
    expected = _take_steps(step_config(check.folder, _MODEL, **options))
    running.wait(check.end)
    reason = LATE if running.is_late else ""
    for name, folder in folders.items():
        name = f"{ranks} ranks, {name}"
        if not (folder / "seen.pt").exists():
            if reason:
                check.not_run(name, reason)
            else:
                check.equal(name, f"no gradients: {running.last_lines()}", "gradients")
                reason = "a mesh before it has failed"
            continue
        seen = torch.load(folder / "seen.pt")
        for key, limit in (("loss", LOSS_LIMIT), ("grad_norm", GRADIENT_LIMIT)):
            error = worst_loss(*([step[key] for step in run["steps"]] for run in (seen, expected)))
            check.at_most(f"{name}: {key} of {_STEPS} steps", error, limit)
        error, worst = worst_error(seen["gradients"], expected["gradients"])
        check.at_most(f"{name}: gradients of the last", error, GRADIENT_LIMIT, note=f"worst of {worst}")


def steps_on_rank(folders: dict[str, int]) -> None:
    """On each rank: the steps of each mesh in turn, by its folder and a port; rank 0 writes what it has seen."""
    for folder, port in folders.items():
        os.environ["MASTER_PORT"] = str(port)
        seen = _take_steps(read(["--config", f"{folder}/config.yaml"]))
        if parallel.launched_rank() == 0:
            torch.save(seen, Path(folder) / "seen.pt")


def _take_steps(cfg: Any) -> dict[str, Any]:
    step, rows = Step(cfg, _MODEL), random_rows(_MODEL.sizes["vocab_size"], BATCH * _STEPS)
    steps = [step.take(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    parallel.stop()
    return {"steps": steps, "gradients": step.gradients}


def _kill_a_rank(check: Check, ranks: int) -> None:
    """The launcher must end the others soon, and the run go on from its last asynchronous save, here on one rank."""
    write_base(check.folder, _MODEL)
    config = job(check, "killed", ranks=ranks, **kill_hook(rank=1))
    arguments = ["run", "--nproc_per_node", str(ranks), config]
    launcher = Ranks("launcher", "finch.cli.main:main", {"arguments": arguments}, check.folder)
    train(job(check, "straight"))
    name = "a killed rank: the launcher ends with an error"
    launcher.finish(check.end)
    check.equal(name, launcher.codes != [0], True, note=f"exit code {launcher.codes[0]}")
    compare_resumed(check, f"a killed rank of {ranks}, resumed on one against a run on one", is_exact=False)
