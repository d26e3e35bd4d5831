"""L2 toward the pretrained weights: a penalty on how far the parameters have moved from where fine-tuning began.

    P = strength * sum_j (theta_j - theta0_j)^2        "sum"
        strength * sum_j (theta_j - theta0_j)^2 / 2    "half"
        strength * mean_j (theta_j - theta0_j)^2       "mean", over all parameters of the model

Li et al., "Explicit Inductive Bias for Transfer Learning with Convolutional Networks" (2018, arXiv 1802.01483), call it L2-SP. The
three forms differ by a factor alone; under "mean" that factor is so small for a large model that a strength made for the others
does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from finch import dtensor

FORMS = ("sum", "half", "mean")

_IsSharded = tuple[bool, ...]  # for each dimension of a parameter's mesh, whether the ranks hold different parts of it


class L2:
    """Adds the penalty's gradient to the gradients of a step, on each rank's own shards.

        penalty = L2(strength=1e-3)
        penalty.start(model.named_parameters())   # with the pretrained weights in place
        for batch in loader:
            model(batch).backward()
            metrics = penalty.add_gradients()     # once per optimizer step, before clipping
            optimizer.step()

    The penalty stays out of the loss: its gradient needs no backward, no gathered parameters and no graph, and the
    loss that is logged, or sets FINCH's learning rate, stays cross-entropy.

    theta0 costs as much memory as this rank's part of the trainable parameters.

    Args:
        strength: at least 0; 0 leaves the gradients alone, and the distance is still measured.
        form: ``"sum"``, ``"half"`` or ``"mean"``.
        offload: keep theta0 on the CPU, pinned for parameters on CUDA. It is then copied to the device once per step.

    Raises:
        ValueError: an argument outside its range, named with its value.
    """

    def __init__(self, strength: float = 1e-3, form: str = "sum", offload: bool = False) -> None:
        if isinstance(strength, bool) or not isinstance(strength, (int, float)):
            raise ValueError(f"strength={strength!r} must be a number, such as 1e-3")
        if not (strength >= 0 and math.isfinite(strength)):
            raise ValueError(f"strength={strength} must be finite and not below 0: give 1e-3, or 0 for no penalty")
        if form not in FORMS:
            raise ValueError(f"form={form!r} must be 'sum', 'half' or 'mean'")
        if not isinstance(offload, bool):
            raise ValueError(f"offload={offload!r} must be True or False")
        self.strength = float(strength)
        self.form = form
        self.offload = offload
        self._pretrained: list[tuple[nn.Parameter, torch.Tensor]] = []  # each with this rank's part of its theta0
        self._num_parameters = 0

    @torch.no_grad()
    def start(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copies the present values of the trainable parameters as theta0.

        Args:
            parameters: all of the model's with their names, sharded or not, each tensor once. Frozen ones count in the
                mean alone, where they add 0.

        Raises:
            ValueError: none of them is trainable.
        """
        self._pretrained, self._num_parameters = [], 0
        for _, parameter in parameters:
            self._num_parameters += parameter.numel()
            if parameter.requires_grad:
                self._pretrained.append((parameter, self._empty_like(parameter).copy_(dtensor.to_local(parameter))))
        if not self._pretrained:
            raise ValueError("parameters=[] holds nothing trainable: give the model's named parameters before training")

    @torch.no_grad()
    def add_gradients(self) -> dict[str, torch.Tensor]:
        """Adds the penalty's gradient to every ``grad``; a parameter without one gets one.

        Call it once per optimizer step, after all its backwards, which have averaged over ranks, and before clipping.
        All ranks must call it: it sums one number over each mesh. The host does not wait for the device.

        Returns:
            ``l2_penalty`` and ``distance``, ||theta - theta0||_2 over all shards before the update; [], float64.

        Raises:
            RuntimeError: ``start`` was not called.
        """
        if not self._pretrained:
            raise RuntimeError("L2.start was not called: give it the model's named parameters before training")
        slope = {"sum": 2.0, "half": 1.0, "mean": 2.0 / self._num_parameters}[self.form] * self.strength
        norms: dict[DeviceMesh | None, dict[_IsSharded, list[torch.Tensor]]] = {}
        for parameter, pretrained in self._pretrained:
            local = dtensor.to_local(parameter)
            # theta0 - theta, in the one temporary that also upcasts and uploads theta0.
            dtype = torch.promote_types(local.dtype, torch.float32)
            difference = pretrained.to(local.device, dtype, non_blocking=True, copy=True).sub_(local)
            mesh, is_sharded = _layout(parameter)
            norms.setdefault(mesh, {}).setdefault(is_sharded, []).append(torch.linalg.vector_norm(difference))
            if self.strength > 0:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dtensor.to_local(parameter.grad).add_(difference, alpha=-slope)
        total = torch.stack([_sum_of_squares(mesh, groups) for mesh, groups in norms.items()]).sum()
        return {"l2_penalty": total * (slope / 2), "distance": total.sqrt()}

    def _empty_like(self, parameter: torch.Tensor) -> torch.Tensor:
        local = dtensor.to_local(parameter)
        if not self.offload:
            return torch.empty_like(local)
        return torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")


def _layout(parameter: torch.Tensor) -> tuple[DeviceMesh | None, _IsSharded]:
    if not isinstance(parameter, DTensor):
        return None, ()
    return parameter.device_mesh, tuple(not isinstance(placement, Replicate) for placement in parameter.placements)


def _sum_of_squares(mesh: DeviceMesh | None, norms: dict[_IsSharded, list[torch.Tensor]]) -> torch.Tensor:
    """The squares of all shards' norms on one mesh, each shard counted once; [], one collective.

    DTensor sums over the mesh dimensions that shard any parameter. A parameter that is replicated along such a dimension would be
    counted once for each copy, so its norm is divided by their number.
    """
    is_summed = [any(dimension) for dimension in zip(*norms, strict=True)]
    shares = []
    for is_sharded, group in norms.items():
        sizes = zip(() if mesh is None else mesh.shape, is_summed, is_sharded, strict=True)
        copies = math.prod(size for size, summed, sharded in sizes if summed and not sharded)
        shares.append(torch.stack(group).double().square().sum() / copies)
    total = torch.stack(shares).sum()
    if mesh is None:
        return total
    placements = [Partial() if summed else Replicate() for summed in is_summed]
    total = total.to(mesh.device_type, non_blocking=True)  # offloaded shards live on the CPU
    return dtensor.full_tensor(DTensor.from_local(total, mesh, placements, run_check=False))
