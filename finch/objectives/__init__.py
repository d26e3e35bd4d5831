"""Training objectives: how much each target token weighs in the loss, and what the weighted sum is divided by; L2 and KL penalties.

The training loop gathers what an objective declares in ``needs`` and ``statistic``. Nothing here knows of ranks, YAML or torchtune.
Needs only torch.
"""

from finch.objectives.base import IGNORE_INDEX, Batch, CrossEntropy, Objective, median
from finch.objectives.token_weights import DFT, EAFT, FLOW, STM, TALR

__all__ = ["DFT", "EAFT", "FLOW", "IGNORE_INDEX", "STM", "TALR", "Batch", "CrossEntropy", "Objective", "median"]
