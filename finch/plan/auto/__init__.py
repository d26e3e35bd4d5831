"""From a model's folder and a file of rows to a complete config, for ``auto``."""

from finch.plan.auto.config import complete

__all__ = ["complete"]
