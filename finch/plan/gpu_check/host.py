"""How long the host takes for a step's operators and collectives: measured on a small model's step, whose kernels take next to no time."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torchtune.modules import RMSNorm

from finch.distributed.precision import precision_of
from finch.plan.estimate.fake_step import StepEstimate, estimate_step, fake_group
from finch.plan.estimate.formula import Rows
from finch.plan.gpu_check.models import TARGETS, TINY_SIZE, qwen3_model, random_rows, step_config
from finch.plan.gpu_check.step import Step

_LAYERS, _GROUP, _RANKS, _STEPS = 8, 2, 8, 12


@functools.cache
def host_rates(device: str = "cpu") -> tuple[float, float]:
    """Microseconds of this machine's host for an operator of a layer, with what Python and autograd do around it and its launch on ``device``, and for
    a collective of FSDP2, with its hooks and copies, on the CPU whatever the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of all would count
    try:
        with tempfile.TemporaryDirectory() as folder:
            (alone, one), (sharded, many) = (_step(Path(folder), ranks) for ranks in (1, _RANKS))
            launched = alone if device == "cpu" else _step(Path(folder), 1, device)[0]
    finally:
        torch.set_num_threads(threads)
    operators = sum(one.launches.values())
    rest = sharded - alone / operators * sum(many.launches.values())
    return 1e6 * launched / operators, 1e6 * max(0.0, rest) / len(many.collectives)


def _step(folder: Path, ranks: int, device: str = "cpu") -> tuple[float, StepEstimate]:
    """Seconds of the fastest step, since other work on the machine only adds, and what is in it on a GPU."""
    model = qwen3_model("tiny", TINY_SIZE, num_layers=_LAYERS, tie_word_embeddings=True)
    [row] = rows = random_rows(TINY_SIZE["vocab_size"], 1)
    changes = {"batch_size": 1, "fsdp_layers_per_group": _GROUP}
    is_cpu, seconds = device == "cpu", list[float]()
    cfg = step_config(folder, model, device=device, dtype="fp32" if is_cpu else "bf16", **changes)
    clock = time.process_time if is_cpu else time.perf_counter  # the driver's thread has a part in a launch
    with fake_group(cfg, ranks, precision_of(cfg.dtype)) if is_cpu else contextlib.nullcontext() as group:
        step = Step(cfg, model, group=group)
        step.on_gradients = lambda: None
        if is_cpu:
            _as_on_a_gpu(step)
        batches = step.batches(rows)
        for _ in range(_STEPS):
            start = clock()
            step.step(batches)
            if not is_cpu:
                torch.cuda.synchronize()
            seconds.append(clock() - start)
    cfg = step_config(folder, model, device="cuda", dtype="bf16", **changes)
    rows_of = Rows(len(row["tokens"]), TARGETS)
    return min(seconds), estimate_step("finch_full_finetune", cfg, ranks=ranks, rows=rows_of)


def _as_on_a_gpu(step: Step) -> None:
    """With one operator in place of a GPU's fused RMS norm, which on a CPU is several; it takes each step."""
    take_every_step(step)
    for norm in step.model.modules():
        if isinstance(norm, RMSNorm):
            norm.forward = functools.partial(_as_one_operator, norm)


def _as_one_operator(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.scale, None, norm.eps)


def take_every_step(step: Step) -> None:
    """Gathered weights of fake ranks are what was in memory, at times NaN: the learning rate follows a loss of 1, so that no step is left out."""
    schedule = step.step.update.schedule
    follow, one = schedule.step, torch.ones(())
    vars(schedule)["step"] = lambda _, targets: follow(one, targets)
