"""The optimizers a config asks for: one, or with ``optimizer_in_bwd`` one for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from finch import dtensor
from finch.config.instantiate import build
from finch.distributed.precision import Precision
from finch.optim.optimizer_in_backward import optimizers_in_backward
from finch.optim.stochastic_rounding import adapt, stochastic_optimizer


def build_optimizers(
    cfg: DictConfig, parameters: Sequence[nn.Parameter], precision: Precision, device: torch.device, *, tensor_lr: bool
) -> list[Optimizer]:
    """
    Args:
        parameters: the trained ones.
        tensor_lr: keep the learning rate as a tensor on ``device`` where the optimizer supports it, for a schedule that
            never synchronises with a GPU.
    """
    node = {**cfg.optimizer}
    if precision.stochastic:
        component, arguments = stochastic_optimizer(node.pop("_component_"), node)
        node = {"_component_": component, **arguments}
    on_device = tensor_lr and device.type == "cuda" and node.get("fused") and not cfg.fsdp_cpu_offload

    def make(params: list[nn.Parameter]) -> Optimizer:
        optimizer = build(node, "optimizer", [{"params": group} for group in dtensor.group_by_mesh(params)])
        if precision.stochastic:
            adapt(optimizer)
        if on_device:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        return optimizer

    return optimizers_in_backward(parameters, make) if cfg.optimizer_in_bwd else [make(list(parameters))]
