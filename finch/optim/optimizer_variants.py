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
      with a shard. Here each rank updates its shard as a plain tensor.
    - The states of its unquantized optimizers become fp32. In bf16 and with beta2 0.999 the second moment of a
      gradient of 1 cannot exceed 0.5, since each increment is rounded away, and the steps grow by up to 41%. The 8-bit
      and 4-bit optimizers are unchanged.
    """
    fp32_states = (_Fp32States,) if type(optimizer).__name__ in ("_AdamW", "_Adam") else ()
    on_local_shards(optimizer, *fp32_states)


def on_local_shards(optimizer: Optimizer, *others: type) -> None:
    """Makes the steps of an optimizer with elementwise updates run on each rank's shards as plain tensors, in place; ``others``: further classes
    that override its methods.

    torch's fused kernels need no dispatch of DTensors then, which takes the host three times as long. And with a tensor as learning rate, whose
    kernel torch cannot trace without running it, that dispatch would run it on zeros of the complete weights.
    """
    kind = type(optimizer)
    if not issubclass(kind, _LocalStep):
        optimizer.__class__ = type(f"Local{kind.__name__}", (_LocalStep, *others, kind), {})


class _Fp32States(Optimizer):
    def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(parameter, dtype=torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # It has cast the states to the weights' dtype.
        groups = (state_dict["param_groups"], self.param_groups)
        saved, own = ([name for group in each for name in group["params"]] for each in groups)
        for name, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if key != "step":
                    self.state[parameter][key] = value.to(parameter.device, torch.float32)


class _LocalStep:
    """Each rank updates its shards as plain tensors: for updates that are elementwise, with the same result. Outside of ``step`` parameters and
    states are DTensors, so that checkpoints have the complete tensors' names and shapes."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, Any]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = [group["params"] for group in self.param_groups]
        state = self.state
        # Kept between steps: to make them anew is most of what a step costs the host.
        kept: dict[torch.Tensor, _StandIn] = vars(self).setdefault("_stand_ins", {})
        for parameter in (parameter for group in groups for parameter in group):
            one, own, grad = kept.get(parameter), state.get(parameter), parameter.grad
            if one is None or not one.stands_for(parameter, own):
                one = kept[parameter] = _StandIn(parameter, own)
            one.local.grad = None if grad is None else to_local(grad)
        try:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = [kept[parameter].local for parameter in parameters]
            # An optimizer finds a parameter's states by the parameter, which for this step is its local stand-in.
            self.state = defaultdict(dict)
            self.state.update({each.local: each.local_state for each in kept.values() if each.local_state})
            result = super().step(closure)  # type: ignore[misc]
            for parameter, each in kept.items():
                made = self.state.get(each.local, {})
                if len(made) != each.size:  # in the first step; later on states are updated in place
                    state[parameter].update(
                        {key: _as_sharded_as(parameter, made[key]) for key in made.keys() - state[parameter].keys()}
                    )
        finally:
            self.state = state
            for each in kept.values():
                each.local.grad = None  # else zero_grad would free nothing
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the step that it calls has torch's hooks: once is enough


class _StandIn:
    """A parameter's shard as a parameter of its own in the same memory, with its states."""

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any] | None) -> None:
        self._shard, self._state = _shard(parameter), state
        self.local = nn.Parameter(self._shard.detach(), requires_grad=False)
        self.local_state = {key: to_local(value) for key, value in (state or {}).items()}
        self.size = len(self.local_state)

    def stands_for(self, parameter: torch.Tensor, state: dict[str, Any] | None) -> bool:
        """FSDP2 may put another tensor in the shard's place; loading a checkpoint makes new states, and the first step the first ones."""
        return self._shard is _shard(parameter) and self._state is state and self.size == len(state or ())


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """Always the same object, which ``to_local`` makes a new view of."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _as_sharded_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # The number of the step, a 0-d tensor, is no shard.
    if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape:
        return value
    # Without shape and stride all shards would be taken to be as large as this one.
    size: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False, **size)


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
