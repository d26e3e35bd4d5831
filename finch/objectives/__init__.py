"""Training objectives: how much each target token weighs in the loss, and what the weighted sum is divided by.

One file an objective, beside ``base`` (the interface, and the sequence losses that several need), ``kl`` (a penalty that is added
to any objective) and ``regularization`` (the L2 penalty, which is added to gradients and not to the loss). The training loop
gathers what an objective declares in ``needs`` and ``statistic``; nothing here knows of ranks, YAML or torchtune. Needs torch
alone. May import errors and dtensor; must not import optim, config or anything above.
"""

from finch.objectives.base import IGNORE_INDEX, Batch, CrossEntropy, Objective, median
from finch.objectives.dft import DFT
from finch.objectives.eaft import EAFT
from finch.objectives.flow import FLOW
from finch.objectives.stm import STM
from finch.objectives.talr import TALR

__all__ = ["DFT", "EAFT", "FLOW", "IGNORE_INDEX", "STM", "TALR", "Batch", "CrossEntropy", "Objective", "median"]
