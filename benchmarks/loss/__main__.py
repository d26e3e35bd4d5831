"""python -m benchmarks.loss: the loss's memory for every objective, and its time in one pass against recomputed logits.

Memory is counted on fake tensors. Time is of forward and backward of the loss alone, CPU, fp32, in alternating rounds.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loss.memory import NUM_CHUNKS, OBJECTIVES, HeadAlone, extra_memory, weighting_of
from finch.objectives import DFT
from finch.training import chunked_loss
from finch.training.chunked_loss import TokenLoss

ROUNDS = 5
VOCAB_SIZE, NUM_TOKENS, DIM = 49_152, 4_096, 576  # SmolLM2-135M's output layer


def main() -> None:
    vocab_size, num_tokens = 151_936, 16_384
    full = 4 * vocab_size * num_tokens
    print(
        f"vocabulary {vocab_size:,}, {num_tokens:,} targets: fp32 logits {full / 1e9:.2f} GB, an eighth {full / 8e9:.2f} GB"
    )
    print("beyond parameters, gradients and hidden states, GB: [one pass, recomputed]")
    for dim, dtype in ((1024, torch.float32), (2560, torch.bfloat16), (2560, torch.float32)):
        for name in OBJECTIVES:
            measure = functools.partial(extra_memory, name, vocab_size, num_tokens, dim, dtype)
            found = [run(measure) / 1e9 for run in (_one_pass, _recomputed)]
            print(f"  {name:11} embed {dim} {str(dtype).removeprefix('torch.'):9} {found[0]:.2f} {found[1]:.2f}")
    _time()


def _one_pass(run: Any) -> Any:
    return run()


def _recomputed(run: Any) -> Any:
    with mock.patch.object(chunked_loss, "head_of", return_value=None):
        return run()


def _time() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, DIM, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    decoder: Any = HeadAlone(VOCAB_SIZE, hidden)
    torch.nn.init.normal_(decoder.tok_embeddings.weight, std=0.02, generator=generator)
    model = TokenLoss(decoder, NUM_CHUNKS)
    weighting = weighting_of(DFT(), {"labels": labels}, False)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        hidden.grad = None
        start = time.perf_counter()
        model(labels, labels, weighting=weighting)["total"].backward()
        return time.perf_counter() - start

    product = 2 * VOCAB_SIZE * NUM_TOKENS * DIM
    print(
        f"\nvocabulary {VOCAB_SIZE:,}, embed {DIM}, {NUM_TOKENS:,} targets, DFT, fp32, {torch.get_num_threads()} threads"
    )
    paths = {"one pass": _one_pass, "recomputed": _recomputed}
    for name, run in paths.items():  # also the warm-up
        with FlopCounterMode(display=False) as flops:
            run(step)
        print(f"  {name}: {flops.get_total_flops() / product:.2f} products with the head")
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(ROUNDS):
        for name in list(paths)[:: 1 if number % 2 else -1]:
            times[name].append(paths[name](step))
    ratios = [other / one for one, other in zip(times["one pass"], times["recomputed"], strict=True)]
    for name, values in times.items():
        print(f"  {name}: median {statistics.median(values):.2f} s, from {min(values):.2f} to {max(values):.2f}")
    print(
        f"  recomputed / one pass: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
