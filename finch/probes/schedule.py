"""After which steps probes are evaluated. It follows from config and rows alone: a resumed run, or one on another machine, has the same steps."""

from __future__ import annotations

import math

MAX_SHARE = 0.04
"""Of the time, for all evaluations of an epoch; the estimate may be wrong by a fifth before they take 5%."""
MAX_PER_EPOCH = 10
FORWARD_COST = 0.5
"""Of a token in an evaluation, relative to one in training: a third by the count of operations, more with what each pass costs by itself."""


def default_interval(eval_tokens: int, step_tokens: float, steps_per_epoch: int) -> int:
    """Steps between two evaluations, so that those of an epoch take less than 5% of its time; at most ten an epoch, at least its end.

    Args:
        eval_tokens: of one evaluation.
        step_tokens: of an optimizer step, over all ranks.
    """
    affordable = math.floor(MAX_SHARE * steps_per_epoch / eval_cost(eval_tokens, step_tokens))
    return math.ceil(steps_per_epoch / min(max(affordable, 1), MAX_PER_EPOCH))


def eval_cost(eval_tokens: int, step_tokens: float) -> float:
    """The time of an evaluation in optimizer steps, estimated."""
    return FORWARD_COST * max(eval_tokens, 1) / max(step_tokens, 1.0)
