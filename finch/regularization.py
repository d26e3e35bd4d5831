"""The public paths of :class:`finch.objectives.regularization.L2` and :class:`finch.objectives.regularization.KL`, which configs and saved runs name."""

from finch.objectives.regularization import KL, L2

__all__ = ["KL", "L2"]
