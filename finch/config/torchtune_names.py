"""What differs between torchtune 0.6.1 and its main branch (0.7 development); the only file that knows of both.

Names that are in the same place in both are imported where they are used; tests/test_torchtune_names.py lists them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtune.datasets._sft import SFTTransform
from torchtune.modules import loss as losses

from finch.objectives import IGNORE_INDEX

try:
    from torchtune.models.gemma2._attention import Gemma2Attention
except ImportError:  # main builds Gemma 2 on MultiHeadAttention, without the soft cap of attention scores

    class Gemma2Attention(nn.Module):  # type: ignore[no-redef]
        """Placeholder: nothing is an instance of it."""


# 0.6.1 has the first of torchtune's; main deprecates it for the second, whose other arguments change only memory.
PLAIN_CROSS_ENTROPY: tuple[Any, ...] = (
    nn.CrossEntropyLoss,
    *(getattr(losses, name) for name in ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss") if hasattr(losses, name)),
)


@functools.cache
def labels_come_shifted() -> bool:
    """Whether the installed torchtune's datasets put each label at the token that predicts it.

    main's do, before rows are packed (its pull request 2613); 0.6.1 leaves it to the recipe. Decided by building a row, since
    the version of a checkout is 0.0.0.
    """
    three_tokens = {"tokens": [0, 1, 2], "mask": [False, False, False]}
    row = SFTTransform(model_transform=lambda _: three_tokens)({})
    return int(row["labels"][0]) == 1


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Moves each label, [..., seq] int64, to the token that predicts it, unless the datasets have done so.

    ``labels[..., t]`` of the result is the token after ``tokens[..., t]``, the last one ignored.
    """
    if labels_come_shifted():
        return labels
    return torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE_INDEX)], dim=-1)


def plan_arguments(builder: Callable[..., Any], decoder: nn.Module) -> dict[str, Any]:
    """The arguments for a builder of a tensor-parallel plan that replicates activations between the layers: those it accepts of two.

    torchtune 0.6.1's builders have no arguments and return that plan. main's have the model as an argument, and return that plan
    for ``inference``; their other plan shards activations along the sequence.
    """
    accepted = inspect.signature(builder).parameters
    return {name: value for name, value in (("model", decoder), ("inference", True)) if name in accepted}
