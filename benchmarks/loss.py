"""The loss of long batches over a large vocabulary: memory by objective, and one pass over chunks against recomputed logits.

    python -m benchmarks.loss

Memory is counted on fake tensors: shapes and sizes without values. Time is of forward and backward of the loss only, CPU, fp32, in
alternating rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchtune.modules import TiedLinear

from benchmarks.processes import rotated
from finch.estimate.step_trace import LiveMemory
from finch.objectives import DFT, EAFT, FLOW, STM, TALR, CrossEntropy, Objective
from finch.training import chunked_loss
from finch.training.chunked_loss import TokenLoss
from finch.training.one_pass_loss import Weighting

NUM_CHUNKS, TOP_K = 8, 64
OBJECTIVES: dict[str, tuple[type[Objective], dict[str, Any], str | None]] = {
    "sft": (CrossEntropy, {}, None),
    "dft": (DFT, {}, None),
    "eaft": (EAFT, {}, None),
    "flow": (FLOW, {"tau": 1.0}, None),
    "stm": (STM, {}, None),
    "talr": (TALR, {"tau": 1.0}, None),
    "talr exact": (TALR, {"tau": "exact"}, None),
    "kl": (CrossEntropy, {}, "online"),
    "kl cached": (CrossEntropy, {}, "cached"),
    "asft": (DFT, {}, "online"),
}
"""Class, arguments and the KL penalty's reference."""

ROUNDS = 5
VOCAB_SIZE, NUM_TOKENS, DIM = 49_152, 4_096, 576  # SmolLM2-135M's output layer, for the time
LARGE_VOCAB_SIZE, LARGE_NUM_TOKENS = 151_936, 16_384  # for the memory

T = TypeVar("T")


class OutputLayer(nn.Module):
    """A decoder of no layers, whose hidden states are given; its output layer is tied to the embedding."""

    def __init__(self, vocab_size: int, hidden: torch.Tensor) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, hidden.shape[-1], dtype=hidden.dtype)
        self.norm, self.hidden = nn.Identity(), hidden
        self.output = TiedLinear(self.tok_embeddings)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden


def weighting_of(objective: Objective, batch: dict[str, torch.Tensor], has_kl: bool) -> Weighting:
    """As :class:`finch.training.step_loss.StepLoss` makes it; of an exact statistic, which this forward pass gives."""

    def weights(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return objective.weights(outputs["loss"], {**batch, **outputs})

    one = torch.ones((), dtype=torch.float64)
    is_known = objective.statistic is None
    return Weighting(weights, objective.is_elementwise and is_known, one, one if has_kl else None)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.memory = LiveMemory()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.add(output)
        return output

    def add(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self.memory.add(value, "")


def extra_memory(name: str, vocab_size: int, num_tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes at the peak beyond parameters, hidden states, inputs, and one gradient each of hidden states and head.

    Args:
        name: of ``OBJECTIVES``.
    """
    kind, arguments, kl = OBJECTIVES[name]
    objective = kind(**arguments)
    with FakeTensorMode():
        hidden = torch.empty(1, num_tokens, dim, dtype=dtype, requires_grad=True)
        reference: Any = None
        if kl == "online":
            reference = OutputLayer(vocab_size, hidden.detach().clone()).requires_grad_(False)
        decoder: Any = OutputLayer(vocab_size, hidden)
        model = TokenLoss(decoder, NUM_CHUNKS, reference)
        labels = torch.zeros(1, num_tokens, dtype=torch.long)
        batch = {"labels": labels, "pretrained_token_loss": torch.empty(1, num_tokens), "statistic": torch.ones(())}
        options: dict[str, Any] = {"num_top_logits": EAFT.num_logits} if "top_logits" in objective.needs else {}
        if kl is not None:
            options["has_kl"] = True
        if kl == "cached":
            options["reference_log_probs"] = torch.empty(num_tokens, TOP_K + 1)
            options["reference_tokens"] = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
        weighting = weighting_of(objective, batch, kl is not None)
        given = [*model.parameters(), hidden, batch, options, weighting.scale, reference.hidden if reference else None]
        with _Count() as count:
            count.add(given)
            before = count.memory.total
            count.memory.reset_peak()
            model(labels, labels, weighting=weighting, **options)["total"].backward()
            gradients = (num_tokens + vocab_size) * dim * dtype.itemsize
            return count.memory.peak - before - gradients


def _in_one_pass(run: Callable[[], T]) -> T:
    return run()


def _recomputed(run: Callable[[], T]) -> T:
    with mock.patch.object(chunked_loss, "head_of", return_value=None):
        return run()


PATHS: dict[str, Callable[[Callable[[], Any]], Any]] = {"one pass": _in_one_pass, "recomputed": _recomputed}


def main() -> None:
    full = 4 * LARGE_VOCAB_SIZE * LARGE_NUM_TOKENS / 1e9
    print(
        f"vocabulary {LARGE_VOCAB_SIZE:,}, {LARGE_NUM_TOKENS:,} targets: fp32 logits {full:.2f} GB, an eighth {full / 8:.2f} GB"
    )
    print("beyond parameters, gradients and hidden states, GB: [one pass, recomputed]")
    for dim, dtype in ((1024, torch.float32), (2560, torch.bfloat16), (2560, torch.float32)):
        for name in OBJECTIVES:
            sizes = name, LARGE_VOCAB_SIZE, LARGE_NUM_TOKENS, dim, dtype
            found = " ".join(f"{path(lambda: extra_memory(*sizes)) / 1e9:.2f}" for path in PATHS.values())  # noqa: B023
            print(f"  {name:11} embed {dim} {str(dtype).removeprefix('torch.'):9} {found}")
    print(
        f"\nvocabulary {VOCAB_SIZE:,}, embed {DIM}, {NUM_TOKENS:,} targets, DFT, fp32, {torch.get_num_threads()} threads"
    )
    step = _timed_step()
    for name, path in PATHS.items():  # also the warm-up
        with FlopCounterMode(display=False) as flops:
            path(step)
        products = flops.get_total_flops() / (2 * VOCAB_SIZE * NUM_TOKENS * DIM)
        print(f"  {name}: {products:.2f} products with the head")
    times: dict[str, list[float]] = {name: [] for name in PATHS}
    for number in range(ROUNDS):
        for name in rotated([*PATHS], number):
            times[name].append(PATHS[name](step))
    for name, values in times.items():
        print(f"  {name}: median {statistics.median(values):.2f} s, from {min(values):.2f} to {max(values):.2f}")
    ratios = [other / one for one, other in zip(*times.values(), strict=True)]
    print(
        f"  recomputed / one pass: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


def _timed_step() -> Callable[[], float]:
    """Forward and backward of the loss; returns its seconds."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, DIM, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    decoder: Any = OutputLayer(VOCAB_SIZE, hidden)
    torch.nn.init.normal_(decoder.tok_embeddings.weight, std=0.02, generator=generator)
    model = TokenLoss(decoder, NUM_CHUNKS)
    weighting = weighting_of(DFT(), {"labels": labels}, False)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        hidden.grad = None
        start = time.perf_counter()
        model(labels, labels, weighting=weighting)["total"].backward()
        return time.perf_counter() - start

    return step


if __name__ == "__main__":
    main()
