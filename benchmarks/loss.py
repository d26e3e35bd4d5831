"""The loss of long batches over a large vocabulary: memory by objective, and one pass over chunks against recomputed logits.

    python -m benchmarks.loss

Memory is counted on fake tensors: shapes and sizes without values. Time is of forward and backward of the loss only, CPU, fp32, in
alternating rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchtune.modules import TiedLinear

from benchmarks.processes import alternate, print_times
from finch.objectives import DFT, EAFT, FLOW, STM, TALR, CrossEntropy, Objective
from finch.plan.estimate.step_trace import StepTrace
from finch.training import chunked_loss, readouts
from finch.training.chunked_loss import TokenLoss
from finch.training.one_pass_loss import Weighting

NUM_CHUNKS, TOP_K = 8, 64
OBJECTIVES: dict[str, tuple[Objective, str | None]] = {
    "sft": (CrossEntropy(), None),
    "dft": (DFT(), None),
    "eaft": (EAFT(), None),
    "flow": (FLOW(tau=1.0), None),
    "stm": (STM(), None),
    "talr": (TALR(tau=1.0), None),
    "talr exact": (TALR(tau="exact"), None),
    "kl": (CrossEntropy(), "online"),
    "kl cached": (CrossEntropy(), "cached"),
    "asft": (DFT(), "online"),
}
"""With the KL penalty's reference."""
PATHS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "one pass": nullcontext,
    "recomputed": lambda: mock.patch.object(chunked_loss, "head_of", return_value=None),
}

ROUNDS = 5
VOCAB_SIZE, NUM_TOKENS, DIM = 49_152, 4_096, 576  # SmolLM2-135M's output layer, for the time
LARGE_VOCAB_SIZE, LARGE_NUM_TOKENS = 151_936, 16_384  # for the memory


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


def extra_memory(name: str, vocab_size: int, num_tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes at the peak beyond parameters, hidden states, inputs, and one gradient each of hidden states and head.

    Args:
        name: of ``OBJECTIVES``.
    """
    objective, kl = OBJECTIVES[name]
    with FakeTensorMode():
        hidden = torch.empty(1, num_tokens, dim, dtype=dtype, requires_grad=True)
        reference: Any = None
        if kl == "online":
            reference = OutputLayer(vocab_size, hidden.detach().clone()).requires_grad_(False)
        decoder: Any = OutputLayer(vocab_size, hidden)
        model = TokenLoss(decoder, NUM_CHUNKS, reference)
        labels = torch.zeros(1, num_tokens, dtype=torch.long)
        batch = {"labels": labels, "pretrained_token_loss": torch.empty(1, num_tokens), "statistic": torch.ones(())}
        read = [readouts.top_logits(EAFT.num_logits)] if "top_logits" in objective.needs else []
        kept = [torch.empty(num_tokens, TOP_K + 1), torch.zeros(num_tokens, TOP_K, dtype=torch.int32)]
        if kl is not None:
            read.append(readouts.kl_from(kept[0], kept[1]) if kl == "cached" else readouts.kl_from_pretrained(model))
        weighting = weighting_of(objective, batch, kl is not None)
        given = [
            *model.parameters(),
            hidden,
            batch,
            kept if kl == "cached" else [],
            weighting.scale,
            reference.hidden if reference else None,
        ]
        with StepTrace(model) as trace:
            for each in tree_leaves(given):
                if isinstance(each, torch.Tensor):
                    trace.memory.add(each, "")
            before = trace.memory.total
            trace.memory.reset_peak()
            model({"tokens": labels, "labels": labels}, read, weighting)["total"].backward()
            gradients = (num_tokens + vocab_size) * dim * dtype.itemsize
            return trace.memory.peak - before - gradients


def main() -> None:
    full = 4 * LARGE_VOCAB_SIZE * LARGE_NUM_TOKENS / 1e9
    print(
        f"vocabulary {LARGE_VOCAB_SIZE:,}, {LARGE_NUM_TOKENS:,} targets: fp32 logits {full:.2f} GB, an eighth {full / 8:.2f} GB"
    )
    print("beyond parameters, gradients and hidden states, GB: [one pass, recomputed]")
    for dim, dtype in ((1024, torch.float32), (2560, torch.bfloat16), (2560, torch.float32)):
        for name in OBJECTIVES:
            sizes = name, LARGE_VOCAB_SIZE, LARGE_NUM_TOKENS, dim, dtype
            found = []
            for path in PATHS.values():
                with path():
                    found.append(f"{extra_memory(*sizes) / 1e9:.2f}")
            print(f"  {name:11} embed {dim} {str(dtype).removeprefix('torch.'):9} {' '.join(found)}")
    print(
        f"\nvocabulary {VOCAB_SIZE:,}, embed {DIM}, {NUM_TOKENS:,} targets, DFT, fp32, {torch.get_num_threads()} threads"
    )
    step = _timed_step()

    def run(path: str) -> None:
        with PATHS[path]():
            step()

    for name in PATHS:  # also the warm-up
        with FlopCounterMode(display=False) as flops:
            run(name)
        products = flops.get_total_flops() / (2 * VOCAB_SIZE * NUM_TOKENS * DIM)
        print(f"  {name}: {products:.2f} products with the head")
    print_times(alternate({name: partial(run, name) for name in PATHS}, ROUNDS))


def _timed_step() -> Callable[[], None]:
    """Forward and backward of the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, DIM, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    decoder: Any = OutputLayer(VOCAB_SIZE, hidden)
    torch.nn.init.normal_(decoder.tok_embeddings.weight, std=0.02, generator=generator)
    model = TokenLoss(decoder, NUM_CHUNKS)
    weighting = weighting_of(DFT(), {"labels": labels}, False)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        hidden.grad = None
        model({"tokens": labels, "labels": labels}, weighting=weighting)["total"].backward()

    return step


if __name__ == "__main__":
    main()
