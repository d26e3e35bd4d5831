"""The public paths of :class:`finch.objectives.regularization.L2` and :class:`finch.objectives.kl.KL`, which configs and saved runs name."""

from finch.objectives.kl import KL
from finch.objectives.regularization import L2

__all__ = ["KL", "L2"]
