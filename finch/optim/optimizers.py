"""Two kinds of optimizers: torchao's with stochastic rounding, on FSDP2's shards as well, and steps inside the backward.

A bf16 weight of 0.02 has neighbours 1.2e-4 apart: rounding to the nearest undoes an update of 1e-5 every time. Stochastic
rounding rounds up with a probability equal to the remainder, so that the mean of many such updates is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from finch.base.dtensor import to_local
from finch.base.errors import UserError

# torch's optimizers and torchao's equivalents that can round stochastically.
STOCHASTIC_VARIANTS = {"torch.optim.AdamW": "torchao.optim._AdamW", "torch.optim.Adam": "torchao.optim._Adam"}
# These select a kernel of torch's; torchao compiles its own.
_KERNEL_ARGUMENTS = ("fused", "foreach", "capturable")


def stochastic_optimizer(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block of the torchao optimizer that replaces a config's under ``dtype: bf16_stochastic``. Raises UserError if there is none."""
    component = block["_component_"]
    variant = STOCHASTIC_VARIANTS.get(component, component)
    if not variant.startswith("torchao.optim."):
        raise UserError(
            f"optimizer._component_={component} cannot round stochastically: with dtype=bf16_stochastic use torch.optim.AdamW or one of torchao.optim"
        )
    kept = {key: value for key, value in block.items() if variant == component or key not in _KERNEL_ARGUMENTS}
    return {**kept, "_component_": variant, "bf16_stochastic_round": True}


def adapt(optimizer: torch.optim.Optimizer) -> None:
    """Fixes two defects of a torchao optimizer that rounds stochastically, in place.

    - On FSDP2's shards torchao 0.15 fails: it draws random bits in the shape of the full parameter and compares them
      with a shard. Here each rank updates its shard as a plain tensor, with the same result, since the updates are
      elementwise. Outside of ``step`` parameters and states are DTensors, so checkpoints do not change.
    - The states of its unquantized optimizers become fp32. In bf16 and with beta2 0.999 the second moment of a
      gradient of 1 cannot exceed 0.5, since each increment is rounded away, and the steps grow by up to 41%. The 8-bit
      and 4-bit optimizers are unchanged.
    """
    fp32_states = (_Fp32States,) if type(optimizer).__name__ in ("_AdamW", "_Adam") else ()
    optimizer.__class__ = type(
        f"Adapted{type(optimizer).__name__}", (_UnshardedStep, *fp32_states, type(optimizer)), {}
    )


class _Fp32States:
    def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(parameter, dtype=torch.float32)


class _UnshardedStep:
    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, Any]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = [group["params"] for group in self.param_groups]
        state = self.state
        locals_of = {parameter: _local_parameter(parameter) for group in groups for parameter in group}
        try:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = [locals_of[parameter] for parameter in parameters]
            # torchao finds a parameter's states by the parameter, which for this step is its local stand-in.
            self.state = defaultdict(dict)
            for parameter, local in locals_of.items():
                if parameter in state:
                    self.state[local] = {key: to_local(value) for key, value in state[parameter].items()}
            result = super().step(closure)  # type: ignore[misc]
            for parameter, local in locals_of.items():
                for key, value in self.state[local].items():
                    if key not in state[parameter]:  # made in the first step; later ones are updated in place
                        state[parameter][key] = _as_sharded_as(parameter, value)
        finally:
            self.state = state
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters
        return result


def _local_parameter(parameter: torch.Tensor) -> nn.Parameter:
    local = nn.Parameter(to_local(parameter).detach(), requires_grad=False)  # the same memory
    if parameter.grad is not None:
        local.grad = to_local(parameter.grad)
    return local


def _as_sharded_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # The number of the step, a 0-d tensor, is no shard.
    if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape:
        return value
    # Without shape and stride all shards would be taken to be as large as this one.
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def optimizers_in_backward(
    parameters: Iterable[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]
) -> list[Optimizer]:
    """One optimizer per parameter, made by ``build``, each stepped by its parameter's hook during the backward.

    The gradients of the complete model never exist at one time. So gradient clipping and accumulation are impossible,
    and the learning rate must be set before the backward. FINCH's can be: it depends only on the loss
    (:class:`finch.FinchLR` accepts the list).
    """
    optimizers = []
    for parameter in parameters:
        optimizer = build([parameter])
        parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
        optimizers.append(optimizer)
    return optimizers


def _step(optimizer: Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
