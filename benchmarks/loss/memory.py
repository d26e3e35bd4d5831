"""Peak memory of the loss and its backward, counted on fake tensors: shapes and sizes without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune.modules import TiedLinear

from finch.estimate.live_memory import LiveMemory
from finch.objectives import DFT, EAFT, FLOW, STM, TALR, CrossEntropy, Objective
from finch.training.chunked_loss import TokenLoss
from finch.training.one_pass_loss import Weighting

NUM_CHUNKS = 8
TOP_K = 64
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


class HeadAlone(nn.Module):
    """A decoder of no layers, whose hidden states are given; its output layer is tied to the embedding."""

    def __init__(self, vocab_size: int, hidden: torch.Tensor) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, hidden.shape[-1], dtype=hidden.dtype)
        self.norm, self.hidden = nn.Identity(), hidden
        self.output = TiedLinear(self.tok_embeddings)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden


def weighting_of(objective: Objective, batch: dict[str, torch.Tensor], has_kl: bool) -> Weighting:
    """As :func:`finch.training.step_loss.micro_batch_loss` makes it; of an exact statistic, which this forward pass gives."""

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
            reference = HeadAlone(vocab_size, hidden.detach().clone()).requires_grad_(False)
        decoder: Any = HeadAlone(vocab_size, hidden)
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
