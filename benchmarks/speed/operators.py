"""The time of a profiled step by group of operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MATRIX, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, REST = (
    "matrix products",
    "attention",
    "norms, rotary, elementwise",
    "loss",
    "optimizer, clipping",
    "rest",
)
GROUPS = (MATRIX, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, REST)

# The first entry of which an operator's name, or else that of the operators it runs inside, has a part.
_BY_NAME = (
    (OPTIMIZER, ("Optimizer.", "_fused_adamw", "foreach", "linalg_vector_norm", "clip_grad")),
    (ATTENTION, ("scaled_dot_product", "flash_attention", "PaddingFreeAttention")),
    (MATRIX, ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn_linear")),
    (LOSS, ("softmax", "logsumexp", "nll_loss", "cross_entropy", "TargetLogits")),
)  # fmt: skip
_ELEMENTWISE = (
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "mean", "sum", "silu", "sigmoid", "exp", "log", "cat", "stack",
    "rms_norm", "layer_norm", "where", "copy_", "clone", "contiguous", "sin", "cos", "gelu", "tanh", "relu", "fill_",
)  # fmt: skip


def group_of(names: Iterable[str]) -> str:
    """The group of an operator.

    Args:
        names: the operator's name, then those of the operators it runs inside, innermost first.
    """
    names = list(names)
    for name in names:
        for group, parts in _BY_NAME:
            if any(part in name for part in parts):
                return group
    own = names[0].removeprefix("aten::").rstrip("_")
    return ELEMENTWISE if own in {part.rstrip("_") for part in _ELEMENTWISE} else REST


def seconds_by_group(events: Iterable[Any]) -> dict[str, float]:
    """Seconds of each of ``GROUPS``: an operator's own time, without that of the operators it runs.

    Args:
        events: ``torch.profiler.profile.events()``.
    """
    seconds = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        names, outer = [], event
        while outer is not None:
            names.append(outer.name)
            outer = outer.cpu_parent
        seconds[group_of(names)] += event.self_cpu_time_total / 1e6
    return seconds
