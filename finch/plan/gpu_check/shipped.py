"""Phase 1: the shipped config from random weights, on all GPUs and on one: losses, memory against its estimate, seconds per step."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from finch.base.dtensor import full_tensor
from finch.base.files import gigabytes
from finch.config.parser import read
from finch.distributed import parallel
from finch.plan.estimate.fake_step import estimate_step
from finch.plan.estimate.formula import Rows
from finch.plan.gpu_check.models import (
    BATCH,
    QWEN3_4B,
    TARGETS,
    TINY,
    Model,
    draw_weight,
    random_rows,
    step_config,
    write_config,
)
from finch.plan.gpu_check.plain_model import worst_loss
from finch.plan.gpu_check.processes import Ranks, power_of_two
from finch.plan.gpu_check.report import Check
from finch.plan.gpu_check.step import Step

RANK_TARGET = f"{__name__}:steps_on_rank"
"""What runs on each rank; the tests of the check plant a defect there."""
_STEPS = 30
_LOSS_LIMIT = 1e-2  # bf16 rounds other sums on several ranks, and the weights follow
_MEMORY_FACTOR = 1.25  # of what a step takes on top of weights and states
_UPDATE_SHARE = 0.75  # of the complete weights: norms on a CPU copy the largest tensor to fp32
_MARK = "finch: mark"
_TOP = 5  # operators of a profile


def run(check: Check) -> None:
    losses: dict[int, list[float]] = {}
    for ranks in dict.fromkeys((power_of_two(check.ranks), 1)):  # all GPUs first
        name = f"{_model(check.device).name}, {ranks} rank{'s' * (ranks > 1)}"
        if check.has_time(name):
            with check.case(name):
                losses[ranks] = _run_on(check, name, ranks)
    if len(losses) == 2 and all(losses.values()):
        error = worst_loss(*losses.values())
        check.at_most(f"losses of {_STEPS} steps, several ranks against one", error, _LOSS_LIMIT)


def _run_on(check: Check, name: str, ranks: int) -> list[float]:
    """The losses; none where the GPU is too small."""
    folder, model = check.folder / f"{ranks}_ranks", _model(check.device)
    folder.mkdir()
    changes: dict[str, Any] = {"device": check.device, "batch_size": BATCH // ranks}
    changes |= {"fsdp_reshard_after_forward": False} if ranks > 1 else {}  # as the config's header says
    arguments = {"config": write_config(folder, model, **changes), "file": str(folder / "seen.json")}
    running = Ranks("rank", RANK_TARGET, arguments, folder, ranks=ranks)
    lengths = [len(row["tokens"]) for row in _rows(model)[-BATCH:][: BATCH // ranks]]  # of rank 0's last step
    rows = Rows(round(statistics.mean(lengths)), TARGETS)
    expected = estimate_step("finch_full_finetune", step_config(folder, model, **changes), ranks=ranks, rows=rows)
    running.finish(check.end)
    if not Path(arguments["file"]).exists():
        total = torch.cuda.get_device_properties(0).total_memory if check.device == "cuda" else 0
        if total and expected.device_peak > total:
            check.not_run(
                name, f"it needs about {gigabytes(expected.device_peak)}, and this GPU has {gigabytes(total)}"
            )
            return []
        raise RuntimeError(running.last_lines())
    seen = json.loads(Path(arguments["file"]).read_text(encoding="utf-8"))
    estimated = (expected.peak - sum(expected.between_steps.values())) / 1e9
    what = f"{name}: memory of a step on top of weights and states, GB"
    check.at_most(what, seen["step"] / 1e9, _MEMORY_FACTOR * estimated, expected=estimated)
    what, size = f"{name}: temporary memory of the update, GB", seen["weights"] / 1e9
    check.at_most(what, seen["update"] / 1e9, _UPDATE_SHARE * size, note=f"the complete weights have {size:.3g}")
    check.equal(f"{name}: losses are finite", all(map(math.isfinite, seen["losses"])), True)
    check.measured(f"{name}: seconds per step", seen["seconds"])
    check.measured(f"{name}: operators of a step, ms", seen["busy_ms"], note=seen["longest"])
    return list(seen["losses"])


def _model(device: str) -> Model:
    return TINY["Q"] if device == "cpu" else QWEN3_4B


def _rows(model: Model) -> list[dict[str, list[int]]]:
    return random_rows(model.sizes["vocab_size"], BATCH * (_STEPS + 1))


def steps_on_rank(config: str, file: str) -> None:
    """On each rank: the steps, and one more in which memory and operators are looked at; rank 0 writes what it has seen."""
    cfg = read(["--config", config])
    model, device = _model(cfg.device), parallel.local_device(cfg.device)
    # Drawn where they are used: a host would take minutes, and eight ranks eight times the memory.
    draw = functools.partial(draw_weight, generator=torch.Generator(device).manual_seed(0))
    step, rows, losses, seconds = Step(cfg, model, draw), _rows(model), list[float](), list[float]()
    step.on_gradients = lambda: None
    *first, last = (step.batches(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH))
    for batches in first:
        begin = time.perf_counter()
        losses.append(float(full_tensor(torch.as_tensor(step.step(batches)["loss"]))))
        seconds.append(time.perf_counter() - begin)
    seen = {"losses": losses, "seconds": statistics.median(seconds[_STEPS // 2 :]), **_look_at(step, last)}
    if parallel.launched_rank() == 0:
        Path(file).write_text(json.dumps(seen), encoding="utf-8")
    parallel.stop()


def _look_at(step: Step, batches: Any) -> dict[str, Any]:
    """Bytes that a step takes on top of what is there before it, and its update on top of what is there then; the time of its operators."""
    is_cuda, marks = step.device.type == "cuda", list[tuple[int, int]]()

    def mark() -> None:
        """What is allocated now, and was at most since the last mark."""
        with record_function(_MARK):
            if is_cuda:
                marks.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
                torch.cuda.reset_peak_memory_stats()

    step.on_gradients = mark
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + is_cuda]
    with profile(activities=kinds, profile_memory=not is_cuda, acc_events=True) as found:
        mark()
        float(full_tensor(torch.as_tensor(step.step(batches)["loss"])))
        mark()
    (start, _), (middle, first), (_, second) = marks if is_cuda else _from_profile(found)
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    times = sorted(((getattr(each, key) / 1e3, each.key) for each in found.key_averages()), reverse=True)
    longest = ", ".join(f"{name[:60]} {ms:.1f}" for ms, name in times[:_TOP])
    weights = sum(weight.nbytes for weight in step.model.parameters())  # a sharded one has the size of the complete one
    memory = {"step": max(first, second) - start, "update": second - middle, "weights": weights}
    return {**memory, "busy_ms": sum(ms for ms, _ in times), "longest": longest}


def _from_profile(found: Any) -> list[tuple[int, int]]:
    """The marks of a CPU, whose allocator keeps no count: from the events of a profile."""
    marks, now, most = [], 0, 0
    for event in sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _MARK:
            marks.append((now, most))
            most = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return marks
