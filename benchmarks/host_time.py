"""What the host does in a step: the operators of a model's layers at sizes whose kernels take next to no time.

    python -m benchmarks.host_time [--ranks 1,8] [--layers 36] [KEY=VALUE ...]

Qwen3-4B's layers and the shipped config with other sizes, on a CPU, the way a GPU takes: one attention call per layer, fused norms, the learning
rate and the clipping in the optimizer's kernel. The attention kernels allocate their outputs and compute nothing; a layer norm replaces the
RMS norm: each is one operator. Ranks are torch's fake ones: collectives return at once. Milliseconds of process time per step, in all and by part:
the least of 40, since other work on the machine only adds; and the estimate of `finch check --exact` at this machine's rates.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.processes import machine, print_rows
from finch.distributed.precision import precision_of
from finch.objectives import IGNORE_INDEX
from finch.plan.estimate.fake_step import estimate_step, fake_group
from finch.plan.estimate.formula import Rows
from finch.plan.estimate.step_time import Rates
from finch.plan.gpu_check.host import host_rates, take_every_step
from finch.plan.gpu_check.models import PREFIX, TINY_SIZE, qwen3_model, random_rows, step_config
from finch.plan.gpu_check.step import Step
from finch.training import loaded_model, model, varlen_attention
from finch.training.step_loss import StepLoss

ROWS, TOKENS = 16, 30
STEPS, WARM_UP = 40, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,8", help="with commas (default: 1,8)")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="of the config; whole numbers and true or false"
    )
    args = parser.parse_args()
    changes = {key: _value(text) for key, _, text in (each.partition("=") for each in args.changes)}
    torch.set_num_threads(1)
    launch_us, collective_us = host_rates()
    rates = Rates(launch_us=launch_us, collective_us=collective_us)
    with tempfile.TemporaryDirectory() as folder, _as_on_a_gpu():
        rows = [_row(Path(folder), int(ranks), args.layers, changes, rates) for ranks in args.ranks.split(",")]
    print(machine())
    print_rows(rows)


def _row(folder: Path, ranks: int, layers: int, changes: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Milliseconds of a step and of its parts, and what ``finch check --exact`` says of it."""
    tiny = qwen3_model("tiny", TINY_SIZE, num_layers=layers, tie_word_embeddings=True)
    cfg = step_config(folder, tiny, device="cpu", dtype="fp32", **{"batch_size": ROWS // ranks, **changes})
    with fake_group(cfg, ranks, precision_of(cfg.dtype)) as group:
        seconds = measure(Step(cfg, tiny, group=group))
    rows = Rows(TOKENS, TOKENS - PREFIX)
    expected = rates.seconds(estimate_step("finch_full_finetune", cfg, ranks=ranks, rows=rows))["host"]
    parts = {part: f"{1e3 * min(each):.1f}" for part, each in seconds.items()}
    return {"ranks": ranks, **parts, "estimated": f"{1e3 * expected:.1f}"}


def measure(step: Step) -> dict[str, list[float]]:
    """Seconds of process time of each step, in all and of its parts."""
    step.on_gradients = lambda: None
    take_every_step(step)
    update, seconds = step.step.update, defaultdict[str, list[float]](list)
    update.clips_in_kernel = True
    for group in update.optimizers[0].param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    rows = random_rows(TINY_SIZE["vocab_size"], ROWS, has_prefix=True)
    targets = [IGNORE_INDEX] * PREFIX
    rows = [{"tokens": row["tokens"][:TOKENS], "labels": targets + row["tokens"][PREFIX:TOKENS]} for row in rows]
    batches = step.batches(rows)
    with contextlib.ExitStack() as stack:
        for owner, name, part in (
            (StepLoss, "__call__", "forward"),
            (torch.Tensor, "backward", "backward"),
            (type(update), "clip", "clip"),
            (type(update), "step", "update"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), seconds[part])))
        whole = _timed(step.step, seconds["step"])
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                for each in seconds.values():
                    each.clear()
            whole(batches)
    return {"step": seconds.pop("step"), **seconds}


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return call(*args, **options)
        finally:
            seconds.append(time.process_time() - start)

    return timed


def _value(text: str) -> int | bool:
    return int(text) if text.isdigit() else text.lower() == "true"


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """The choices and the operators of a GPU's step, without their kernels."""

    def attend(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]))

    def differentiate(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float = 1e-6) -> torch.Tensor:
        return F.layer_norm(x, shape, weight, None, eps)

    with contextlib.ExitStack() as stack:
        for owner, changes in (
            (varlen_attention, {"_attend": attend, "_differentiate": differentiate}),
            (loaded_model, {"choose_way": lambda *_, **__: "one call"}),
            (model, {"keeps_fused_norm": lambda *_: True}),
            (F, {"rms_norm": norm}),
        ):
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


if __name__ == "__main__":
    main()
