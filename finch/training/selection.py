"""Which epoch ``best`` links: the one with the best value of one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def better(
    best: dict[str, Any] | None, key: str | None, name: str, metrics: Mapping[str, float]
) -> dict[str, Any] | None:
    """The best epoch so far: ``{"epoch": name, key: value}``, or None.

    Args:
        best: of the epochs before; one that was chosen by another metric does not count.
        key: of the metric; of an accuracy larger is better, of all others smaller. None: no epoch is chosen.
        name: of the epoch at hand.
        metrics: at its end.
    """
    if key is None:
        return best
    value, old = metrics.get(key), None if best is None else best.get(key)
    if value is None or not math.isfinite(value):
        return best
    sign = -1 if key.endswith("/accuracy") else 1
    return {"epoch": name, key: value} if old is None or sign * value < sign * old else best


def describe_best(best: Mapping[str, Any]) -> str:
    """The metric of the best epoch and its value: ``validation loss 2.5000 nats``."""
    key = next(name for name in best if name != "epoch")
    unit = "" if key.endswith("/accuracy") else " nats"
    return f"{key.replace('_', ' ')} {best[key]:.4f}{unit}"
