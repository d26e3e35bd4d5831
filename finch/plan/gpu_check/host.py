"""How long the host takes for a step's operators and collectives, whatever the device: measured on a small model's step on the CPU, whose
kernels take next to no time."""

from __future__ import annotations

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
def host_rates() -> tuple[float, float]:
    """Microseconds of this machine's host for an operator of a layer, with what Python and autograd do around it, and for a collective of FSDP2, with
    its hooks and copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of all would count
    try:
        with tempfile.TemporaryDirectory() as folder:
            (alone, one), (sharded, many) = (_step(Path(folder), ranks) for ranks in (1, _RANKS))
    finally:
        torch.set_num_threads(threads)
    per_operator = alone / sum(one.launches.values())
    rest = sharded - per_operator * sum(many.launches.values())
    return 1e6 * per_operator, 1e6 * max(0.0, rest) / len(many.collectives)


def _step(folder: Path, ranks: int) -> tuple[float, StepEstimate]:
    """Seconds of the fastest step, since other work on the machine only adds, and what is in it on a GPU."""
    model = qwen3_model("tiny", TINY_SIZE, num_layers=_LAYERS, tie_word_embeddings=True)
    [row] = rows = random_rows(TINY_SIZE["vocab_size"], 1)
    changes = {"batch_size": 1, "fsdp_layers_per_group": _GROUP}
    cfg, seconds = step_config(folder, model, device="cpu", dtype="fp32", **changes), list[float]()
    with fake_group(cfg, ranks, precision_of(cfg.dtype)) as group:
        step = Step(cfg, model, group=group)
        step.on_gradients = lambda: None
        for norm in step.model.modules():
            if isinstance(norm, RMSNorm):
                norm.forward = functools.partial(_as_one_operator, norm)
        batches = step.batches(rows)
        for _ in range(_STEPS):
            start = time.process_time()
            step.step(batches)
            seconds.append(time.process_time() - start)
    cfg = step_config(folder, model, device="cuda", dtype="bf16", **changes)
    rows_of = Rows(len(row["tokens"]), TARGETS)
    return min(seconds), estimate_step("finch_full_finetune", cfg, ranks=ranks, rows=rows_of)


def _as_one_operator(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """One operator in place of a GPU's fused RMS norm, which on a CPU is several."""
    return F.layer_norm(x, norm.normalized_shape, norm.scale, None, norm.eps)
