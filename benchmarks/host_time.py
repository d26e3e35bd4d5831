"""What the host does in a step: the operators of a model's layers at sizes whose kernels take next to no time.

    python -m benchmarks.host_time [--ranks 8] [--layers 36] [KEY=VALUE ...]

Qwen3-4B's layers and the shipped config with other sizes, on a CPU, the way a GPU takes: one attention call per layer, fused norms, the learning
rate and the clipping in the optimizer's kernel. The attention's kernels only allocate, a layer norm stands for the RMS norm: both are one
operator. Ranks are torch's fake ones: collectives return at once. Milliseconds of process time per step, in all and by part: the least of 40, since other work on the machine only adds.
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
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.processes import machine, print_rows
from finch.distributed import parallel
from finch.objectives import IGNORE_INDEX
from finch.plan.gpu_check.models import PREFIX, qwen3_model, random_rows, step_config
from finch.plan.gpu_check.step import Step
from finch.training import loaded_model, model, varlen_attention
from finch.training.step_loss import StepLoss

SIZE = {"num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48, "vocab_size": 320}
ROWS, TOKENS = 16, 30
STEPS, WARM_UP = 40, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="of the config; whole numbers and true or false"
    )
    args = parser.parse_args()
    changes = {key: _value(text) for key, _, text in (each.partition("=") for each in args.changes)}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _as_on_a_gpu(args.ranks):
        seconds = measure(Path(folder), args.ranks, args.layers, changes)
    print(machine())
    print_rows([{"ranks": args.ranks, **{part: f"{1e3 * min(each):.1f}" for part, each in seconds.items()}}])


def measure(folder: Path, ranks: int, layers: int, changes: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of process time of each step, in all and of its parts."""
    tiny = qwen3_model("tiny", SIZE, num_layers=layers, tie_word_embeddings=True)
    cfg = step_config(folder, tiny, device="cpu", dtype="fp32", **{"batch_size": ROWS // ranks, **changes})
    step = Step(cfg, tiny)
    step.on_gradients = lambda: None
    step.step.update.clips_in_kernel = True
    for group in step.step.update.optimizers[0].param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    rows = random_rows(SIZE["vocab_size"], ROWS, has_prefix=True)
    rows = [
        {"tokens": row["tokens"][:TOKENS], "labels": [IGNORE_INDEX] * PREFIX + row["tokens"][PREFIX:TOKENS]}
        for row in rows
    ]
    batches = step.batches(rows)
    seconds: dict[str, list[float]] = defaultdict(list)
    for owner, name, part in (
        (StepLoss, "__call__", "forward"),
        (torch.Tensor, "backward", "backward"),
        (type(step.step.update), "clip", "clip"),
        (type(step.step.update), "step", "update"),
    ):
        setattr(owner, name, _timed(getattr(owner, name), seconds[part]))
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
def _as_on_a_gpu(ranks: int) -> Iterator[None]:
    """The choices and the operators of a GPU's step, without their kernels."""

    def start(*_: Any, **__: Any) -> parallel.Parallel:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return parallel.join(torch.device("cpu"), parallel.MeshSizes().resolve(ranks))

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
            (parallel, {"start_from": start} if ranks > 1 else {}),
        ):
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


if __name__ == "__main__":
    main()
