"""The public path of :class:`finch.objectives.regularization.L2`, which configs and saved runs name."""

from finch.objectives.regularization import L2

__all__ = ["L2"]
