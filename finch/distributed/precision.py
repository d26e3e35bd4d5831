"""The values of ``dtype``: in which precision weights are stored, computed, reduced and updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from finch.base.errors import UserError


@dataclass(frozen=True)
class Precision:
    """One value of the key ``dtype``: the dtypes of parameters and of forward and backward.

    Optimizer states have the dtype of the parameters unless the optimizer rounds its updates stochastically.
    """

    weights: torch.dtype
    compute: torch.dtype
    stochastic: bool
    description: str

    @property
    def is_mixed(self) -> bool:
        return self.weights != self.compute

    def policy(self, *, reduce_in_fp32: bool = False) -> MixedPrecisionPolicy:
        """FSDP2's policy: gathered in the compute dtype, gradients reduced in the weights' dtype, or those of 16-bit weights in fp32."""
        if not self.is_mixed:
            return MixedPrecisionPolicy(
                reduce_dtype=torch.float32 if reduce_in_fp32 and self.weights.itemsize == 2 else None
            )
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.weights)


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32, False, "weights, optimizer states and computation in fp32"),
    "fp64": Precision(torch.float64, torch.float64, False, "weights, optimizer states and computation in fp64"),
    "bf16": Precision(
        torch.bfloat16,
        torch.bfloat16,
        False,
        "pure bf16, as torchtune and the paper's authors: weights, optimizer states and computation; small updates are lost in rounding",
    ),
    "bf16_mixed": Precision(
        torch.float32,
        torch.bfloat16,
        False,
        "mixed: fp32 master weights and optimizer states, bf16 computation, gradients reduced in fp32",
    ),
    "bf16_stochastic": Precision(
        torch.bfloat16,
        torch.bfloat16,
        True,
        "bf16 weights and computation; the optimizer computes and keeps its states in fp32 and rounds stochastically (torchao)",
    ),
}


def precision_of(name: str) -> Precision:
    """The precision that the ``dtype`` of a checked config names."""
    return PRECISIONS[name]


def check_hardware(name: str, device: torch.device) -> None:
    """Raises UserError if ``device`` cannot compute in the dtype."""
    if device.type != "cuda" or PRECISIONS[name].compute != torch.bfloat16:
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):  # it would be many times slower than fp32
        raise UserError(f"dtype={name} needs bf16, which {torch.cuda.get_device_name(device)} lacks: use fp32")
