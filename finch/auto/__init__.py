"""From a model's folder and a file of rows to a complete config, for ``--config auto``.

May import models, weights, data, distributed, config and what is below them; must not import training.
"""

from finch.auto.config import complete

__all__ = ["complete"]
