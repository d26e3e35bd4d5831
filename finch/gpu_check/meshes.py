"""Phase 5: the same step on one rank and on several, over meshes; an asynchronous save, and a rank that is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finch.distributed.parallel import local_device
from finch.gpu_check.folders import write_base, write_rows
from finch.gpu_check.models import BATCH, Model, Weights, initial_weights, models, random_rows, step_config, write_config  # fmt: skip
from finch.gpu_check.objectives import SGD
from finch.gpu_check.processes import Ranks, environment_of, free_port
from finch.gpu_check.report import Check
from finch.gpu_check.runs import blocks_of, compare_losses, losses_of, train
from finch.gpu_check.step import Step, worst_error

RANK_TARGET = "finch.gpu_check.meshes:steps_on_rank"
"""What runs on each rank; the check's own tests plant defects there."""
_STEPS = 3
_LOSS_LIMIT, _GRADIENT_LIMIT = 1e-5, 1e-4
_KILLED_AFTER = 8
_CUDA_LIMIT = 1e-3
_GRACE_S = 60.0  # for the launcher to end the other ranks


def meshes(ranks: int) -> dict[str, dict[str, Any]]:
    """Changes of the config by the name of the mesh."""
    plan = {"tensor_parallel_plan": {"_component_": "finch.models.qwen3.qwen3_tp_plan"}}
    return {
        "FSDP2": {},
        "HSDP, 2 copies": {"data_parallel_replicate_dim": 2},
        "tensor parallelism over 2": {"tensor_parallel_dim": 2, **plan},
        "CPU offload": {"fsdp_cpu_offload": True},
        "no resharding after forward": {"fsdp_reshard_after_forward": False},
        "2 micro-batches": {"gradient_accumulation_steps": 2, "batch_size": BATCH // ranks // 2},
    }


def run(check: Check) -> None:
    ranks = 1 << (check.ranks.bit_length() - 1)  # rows are dealt evenly to a power of two
    model = models(check.device)["Q"]
    weights = initial_weights(model)
    with check.case("ranks"):
        _compare_ranks(check, model, weights, ranks)
    with check.case("a killed rank"):
        _kill_a_rank(check, model, weights, ranks)


def _compare_ranks(check: Check, model: Model, weights: Weights, ranks: int) -> None:
    cases = meshes(ranks)
    configs = {}
    for number, (name, changes) in enumerate(cases.items()):
        sharers = ranks // changes.get("tensor_parallel_dim", 1)
        step_config(check, model, **{**SGD, "dtype": "fp32", "batch_size": BATCH // sharers, **changes})
        configs[name] = str(check.folder / f"mesh_{number}.yaml")
        shutil.copy(check.folder / "config.yaml", configs[name])
    arguments = {"configs": configs, "ports": [free_port() for _ in configs], "device": check.device, "folder": str(check.folder)}  # fmt: skip
    running = Ranks("mesh", RANK_TARGET, arguments, check.folder, ranks=ranks)
    one = step_config(check, model, **{**SGD, "dtype": "fp32", "batch_size": BATCH})
    step = Step(one, weights, torch.device(check.device))
    rows = random_rows(model.sizes["vocab_size"], BATCH * _STEPS)
    expected = [step.take(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    step.close()
    if not running.wait(check.end):
        raise TimeoutError(f"the ranks have not finished before the phase's deadline: {running.last_lines()}")
    for number, name in enumerate(configs):
        file = check.folder / f"mesh_{number}.pt"
        if not file.exists():
            check.equal(f"{ranks} ranks, {name}", running.last_lines(), "gradients")
            continue
        seen = torch.load(file)
        errors = {key: max(abs(one[key] - other[key]) / other[key] for one, other in zip(seen["steps"], expected, strict=True)) for key in ("loss", "grad_norm")}  # fmt: skip
        check.at_most(f"{ranks} ranks, {name}: losses of {_STEPS} steps", errors["loss"], _LOSS_LIMIT)
        check.at_most(f"{ranks} ranks, {name}: gradient norms", errors["grad_norm"], _GRADIENT_LIMIT)
        error, worst = worst_error(seen["gradients"], {key: value.cpu() for key, value in step.gradients.items()})
        check.at_most(f"{ranks} ranks, {name}: gradients of the last", error, _GRADIENT_LIMIT, note=f"worst of {worst}")


def steps_on_rank(configs: dict[str, str], ports: list[int], device: str, folder: str) -> None:
    """On each rank: the steps of each mesh in turn; rank 0 saves metrics and gradients. A mesh that fails ends the rank."""
    from finch.config.parser import read
    from finch.config.schema import FullFinetuneKeys

    for number, config in enumerate(configs.values()):
        os.environ["MASTER_PORT"] = str(ports[number])
        cfg = read(["--config", config], FullFinetuneKeys)
        vocab_size = cfg.model["vocab_size"]
        step = Step(cfg, initial_weights(Model("Q", cfg.model["_component_"], _without_component(cfg.model))), local_device(device))  # fmt: skip
        rows = random_rows(vocab_size, BATCH * _STEPS)
        taken = [step.take(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
        if step.parallel.is_rank_zero:
            gradients = {name: value.cpu() for name, value in step.gradients.items()}
            torch.save({"steps": taken, "gradients": gradients}, Path(folder) / f"mesh_{number}.pt")
        step.close()


def _without_component(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "_component_"}


def _kill_a_rank(check: Check, model: Model, weights: Weights, ranks: int) -> None:
    """The others must end soon, and the run go on from its last asynchronous save, here on one rank."""
    write_base(check.folder / "base", model, weights)
    write_rows(check.folder / "rows.jsonl", 48)
    hook = {"kill": {"_component_": "finch.gpu_check.runs.KillAfter", "step": _KILLED_AFTER, "rank": 1}}
    changes = {"batch_size": 8 // ranks, "hooks": hook}
    config = write_config(check.folder, blocks_of(check, model, "killed", **changes), "killed")
    command = [sys.executable, "-m", "finch.cli", "run", "--nproc_per_node", str(ranks), "--config", config]
    with (check.folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment_of())
    train(write_config(check.folder, blocks_of(check, model, "straight"), "straight"))
    try:
        code: int | None = launcher.wait(max(1.0, check.end - time.time()))
    except subprocess.TimeoutExpired:
        code = None
    check.equal("a killed rank: the launcher ends with an error", code not in (0, None), True, note=f"exit code {code}")
    train(write_config(check.folder, blocks_of(check, model, "killed", resume_from_checkpoint=True), "resumed"))
    expected, seen = losses_of(check.folder / "straight"), losses_of(check.folder / "killed")
    limit = _LOSS_LIMIT if check.device == "cpu" else _CUDA_LIMIT
    compare_losses(check, f"a killed rank of {ranks}, resumed on one from an asynchronous save: losses", seen, expected, limit)  # fmt: skip
