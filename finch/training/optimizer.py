"""The update of a step: optimizers, learning-rate schedule and clipping, in the order in which a step uses them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from finch import FinchLR, ReplayLR
from finch.base import dtensor
from finch.base.log import logger
from finch.config.instantiate import build, component_of, locate
from finch.distributed import fsdp
from finch.distributed.parallel import Parallel
from finch.distributed.precision import Precision
from finch.optim.finch_lr import AUTO_ETA_MAX, are_fused
from finch.optim.optimizer_variants import adapt, on_local_shards, optimizers_in_backward, stochastic_optimizer
from finch.optim.torch_lr import TorchLR
from finch.training.chunked_loss import TokenLoss
from finch.training.clipping import divisor, grad_norm, scale_gradients
from finch.training.reference import ReferenceLosses

Schedule: TypeAlias = FinchLR | ReplayLR | TorchLR

# SmolLM2 at 8e-4: 16% by this count, and 33% that have not moved after the 60 steps of a cosine (docs/precision.md).
_MANY_LOST = 0.1
_SAMPLE_SIZE = 4096  # elements of the parameter that an optimizer's states are counted on
_BLOCK = 256  # elements that share one fp32 scale in the 8-bit optimizers of torchao and bitsandbytes; 4-bit: 128


class Update:
    """Updates the weights after the last backward of a step. ``optimizers`` has one, in :class:`UpdateInBackward` one per parameter.

    Attributes:
        clips_in_kernel: whether the optimizer's fused kernel divides the gradients as it reads them; else they are scaled in memory before.
    """

    def __init__(
        self,
        model: TokenLoss,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
        parallel: Parallel,
        clip_grad_norm: float | str | None = None,
    ) -> None:
        self.optimizers, self.schedule = optimizers, schedule
        self._model, self._parallel = model, parallel
        # Once: to walk through the model takes the host milliseconds.
        self._parameters = list(model.trained_parameters().values())
        self._clip_grad_norm = None if clip_grad_norm is None else float(clip_grad_norm)  # YAML's 1e-5 is text
        self.clips_in_kernel = are_fused(optimizers) and parallel.device.type == "cuda"
        self._scale: torch.Tensor | None = None
        self._last_loss = torch.zeros(())

    def before_backward(self, loss_sum: torch.Tensor, targets: torch.Tensor, denominator: torch.Tensor) -> bool:
        """Whether this micro-batch goes backward. The arguments are those of :meth:`mean_loss` and :meth:`step`."""
        return True

    def mean_loss(self, loss_sum: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[] the step's cross-entropy in nats per target token, whatever the objective; a collective.

        ``loss_sum``: [] over this rank's micro-batches so far; ``targets``: [] target tokens of the step, over all ranks.
        """
        self._last_loss = self._parallel.all_reduce_sum_(loss_sum) / targets.clamp(min=1)
        return self._last_loss

    @torch.no_grad()
    def clip(self) -> torch.Tensor | None:
        """Clips to ``clip_grad_norm`` if set; returns the norm before clipping, [], over all ranks' shards; a collective."""
        norm = grad_norm(self._parameters)
        if self._clip_grad_norm is not None and self.clips_in_kernel:
            self._scale = divisor(norm, self._clip_grad_norm)
        elif self._clip_grad_norm is not None:
            scale_gradients(self._parameters, norm, self._clip_grad_norm)
        return norm.to(self._parallel.device, non_blocking=True)  # offloaded gradients live on the CPU

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def nonfinite(self) -> str:
        """What was not finite in the last step, where something was: ``loss`` or ``gradient``. Waits for the device."""
        return "gradient" if self._last_loss.isfinite() else "loss"

    def step(self, loss: torch.Tensor, grad_norm: torch.Tensor | None, denominator: torch.Tensor) -> None:
        """Sets the learning rate from the step's loss and updates the weights. Where ``denominator`` [], what the objective divides by, is 0, it
        does not."""
        # A non-finite gradient spoils the weights as a non-finite loss does: 0 * norm is then NaN, and else 0.
        if self.schedule.step(loss if grad_norm is None else loss + 0 * grad_norm, denominator):
            if self._scale is not None:  # the protocol of torch.amp.GradScaler
                vars(self.optimizers[0]).update(grad_scale=self._scale)
            self.optimizers[0].step()


class UpdateInBackward(Update):
    """``optimizer_in_bwd``: the backward of the only micro-batch updates the weights, so that the learning rate comes before it."""

    def before_backward(self, loss_sum: torch.Tensor, targets: torch.Tensor, denominator: torch.Tensor) -> bool:
        is_taken = self.schedule.step(super().mean_loss(loss_sum, targets), denominator)
        # The forward has gathered weights, which the backward would free; here none follows.
        if not is_taken:
            fsdp.reshard(self._model)
        return is_taken

    def mean_loss(self, loss_sum: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._last_loss

    def clip(self) -> None:
        """There is no norm: gradients of the complete model never exist at one time."""

    def step(self, loss: torch.Tensor, grad_norm: torch.Tensor | None, denominator: torch.Tensor) -> None:
        """The backward has done it."""


def build_update(
    cfg: DictConfig,
    model: TokenLoss,
    parallel: Parallel,
    precision: Precision,
    *,
    num_steps: int,
    reference: ReferenceLosses | None,
    is_resumed: bool,
) -> Update:
    """The optimizers and the schedule of a run.

    Args:
        num_steps: of the complete run, for schedulers with an end.
        reference: the pretrained model's losses on the training rows, for FINCH's ``init: dataset``.
        is_resumed: whether the EMA will come from a checkpoint.
    """
    parameters = list(model.trained_parameters().values())
    optimizers = build_optimizers(cfg, parameters, precision, parallel.device, tensor_lr=is_finch(cfg))
    is_rounded = cfg.dtype == "bf16" and not cfg.optimizer.get("bf16_stochastic_round")
    if is_rounded and not is_resumed and "adam" in cfg.optimizer["_component_"].lower():
        check_rounding(parameters, float(optimizers[0].param_groups[0]["lr"]), parallel)
    init = cfg.lr_scheduler.get("init") if is_finch(cfg) else None
    if is_resumed:
        # The checkpoint has the EMA: a resumed run need not have the losses that `dataset` starts from.
        init = "first_batch"
    elif uses_dataset_init(cfg) and reference is not None:
        init = reference.mean
    schedule = build_schedule(cfg, optimizers, init=init, num_steps=num_steps)
    return make_update(cfg, model, optimizers, schedule, parallel)


def check_rounding(parameters: Iterable[nn.Parameter], rate: float, parallel: Parallel) -> None:
    """Warns if many weights in bf16 are too large for an update of the learning rate's size, which Adam's rarely exceeds."""
    # Weights from 2^e to 2^(e + 1) lie 2^(e - 7) apart: an update below half of that is rounded away.
    too_large = math.ldexp(1.0, math.frexp(rate)[1] + 8)
    shards = [dtensor.to_local(each.detach()) for each in parameters]
    # Summed on the device: one wait for it, not one for each parameter.
    counts = [int(sum((shard.abs() >= too_large).sum() for shard in shards)), sum(map(torch.numel, shards))]
    lost, total = parallel.all_reduce_sum_(torch.tensor(counts, device=parallel.device)).tolist()
    if lost > total * _MANY_LOST:
        logger.warning(
            f"optimizer.lr={rate:g}: in bf16 {lost / total:.0%} of the weights are so large that an update of this size is rounded away; dtype=bf16_mixed and bf16_stochastic keep it"
        )


def make_update(
    cfg: DictConfig, model: TokenLoss, optimizers: Sequence[Optimizer], schedule: Schedule, parallel: Parallel
) -> Update:
    """The update of a run that has these optimizers and this schedule."""
    update = UpdateInBackward if cfg.optimizer_in_bwd else Update
    return update(model, optimizers, schedule, parallel, cfg.clip_grad_norm)


def build_optimizers(
    cfg: DictConfig, parameters: Sequence[nn.Parameter], precision: Precision, device: torch.device, *, tensor_lr: bool
) -> list[Optimizer]:
    """The optimizers of the trained parameters.

    With ``tensor_lr`` the learning rate stays a tensor on ``device`` where the optimizer supports it, for a schedule that never
    synchronises with a GPU.
    """
    node = stochastic_optimizer(cfg.optimizer) if precision.stochastic else cfg.optimizer
    # Whatever of torch has a fused kernel has elementwise updates.
    on_shards = node["_component_"].startswith("torch.optim.") and node.get("fused")
    on_shards = on_shards and any(isinstance(each, DTensor) for each in parameters)
    # Only a fused kernel on the device takes the rate, and whether to skip, from there without a read by the host.
    on_device = tensor_lr and device.type == "cuda" and node.get("fused") and not cfg.fsdp_cpu_offload

    def make(params: list[nn.Parameter]) -> Optimizer:
        optimizer = build(node, "optimizer", [{"params": group} for group in dtensor.group_by_mesh(params)])
        if precision.stochastic:
            adapt(optimizer)
        elif on_shards:
            on_local_shards(optimizer)
        if on_device:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        return optimizer

    return optimizers_in_backward(parameters, make) if cfg.optimizer_in_bwd else [make(list(parameters))]


def loss_schedule(cfg: DictConfig) -> type[FinchLR | ReplayLR] | None:
    """The class of ``lr_scheduler`` if it is stepped with the loss, before the optimizer; None for torch's schedulers or none."""
    path = component_of(cfg.lr_scheduler)
    component = None if path is None else locate(path, "lr_scheduler")
    return component if isinstance(component, type) and issubclass(component, (FinchLR, ReplayLR)) else None


def is_finch(cfg: DictConfig) -> bool:
    kind = loss_schedule(cfg)
    return kind is not None and issubclass(kind, FinchLR)


def uses_dataset_init(cfg: DictConfig) -> bool:
    """Whether FINCH's EMA starts at the pretrained model's mean loss: ``init: dataset``, the default, as in the paper."""
    return is_finch(cfg) and cfg.lr_scheduler.get("init", "dataset") == "dataset"


def on_nonfinite(cfg: DictConfig) -> str:
    """What the run does about a non-finite loss: the recipe's key, else the schedule's own."""
    if cfg.on_nonfinite is None and loss_schedule(cfg) is not None:
        return cfg.lr_scheduler.get("on_nonfinite", "raise")
    return cfg.on_nonfinite or "raise"


def torch_schedule(cfg: DictConfig, optimizers: Sequence[Optimizer], num_steps: int) -> TorchLR:
    """One of torch's or torchtune's schedulers, or a constant rate. Raises UserError for an argument out of its range."""
    node, scheduler = dict(cfg.lr_scheduler or {}), None
    options = {"decay": node.pop("decay", 0.0), "total_steps": num_steps, "on_nonfinite": on_nonfinite(cfg)}
    if node:
        scheduler = build(node, "lr_scheduler", optimizers[0], num_training_steps=num_steps, last_epoch=-1)
    return build({"_component_": "finch.optim.torch_lr.TorchLR", **options}, "lr_scheduler", optimizers, scheduler)


def build_schedule(
    cfg: DictConfig, optimizers: Sequence[Optimizer], *, init: float | str | None, num_steps: int
) -> Schedule:
    """The schedule of the config. ``init``: FINCH's Lbar_0; ``num_steps``: of the complete run, for schedulers with an end."""
    if cfg.lr_scheduler is not None and (decay := cfg.lr_scheduler.get("decay")):
        logger.info(f"learning rate: the last {decay:.0%} of {num_steps} steps go linearly to 0")
    if loss_schedule(cfg) is None:
        if component_of(cfg.lr_scheduler) is None:
            logger.info(f"constant learning rate {float(optimizers[0].param_groups[0]['lr']):g}")
        return torch_schedule(cfg, optimizers, num_steps)
    node = {"total_steps": num_steps, **cfg.lr_scheduler, "on_nonfinite": on_nonfinite(cfg)}
    if not is_finch(cfg):
        shape = cfg.lr_scheduler.get("shape", "curve")
        logger.info(f"replaying the learning rates of {cfg.lr_scheduler.log}, shape={shape}")
        return build(node, "lr_scheduler", optimizers)
    # The class names its arguments; the log names the config's keys.
    with warnings.catch_warnings(record=True, action="always") as caught:
        finch = build({**node, "init": init}, "lr_scheduler", optimizers)
    for warning in caught:
        logger.warning(finch_warning(warning.message))
    start = f", EMA starts at {init:.4f} nats" if isinstance(init, float) else ""
    logger.info(
        f"FINCH: eta_base {finch.eta_base:g}, eta_max {finch.eta_max:g} "
        f"(reached below {finch.capped_below:.2g} nats), ema {finch.ema:g}{start}"
    )
    return finch


def finch_warning(message: Warning | str) -> str:
    """A warning of FinchLR as keys have it."""
    return str(message).replace(AUTO_ETA_MAX, "lr_scheduler.eta_max=auto")


def optimizer_bytes(cfg: DictConfig, precision: Precision) -> float:
    """Bytes of optimizer state per trained parameter: counted on a small parameter, by name for optimizers that compile a kernel."""
    node = stochastic_optimizer(cfg.optimizer) if precision.stochastic else cfg.optimizer
    module, _, name = node["_component_"].rpartition(".")
    for pattern, bits, block in (("8bit", 8, _BLOCK), ("fp8", 8, _BLOCK), ("4bit", 4, _BLOCK // 2)):
        if pattern in name.lower():
            return 2 * (bits / 8 + 4 / block)
    if module.startswith("torchao"):  # its Adam has two moments
        return 2 * (4 if precision.stochastic else precision.weights.itemsize)
    parameter = nn.Parameter(torch.zeros(_SAMPLE_SIZE, dtype=precision.weights))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build(node, "optimizer", [parameter])
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)  # without the hooks that are registered for all optimizers' steps
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(state.numel() * state.itemsize for state in states) / _SAMPLE_SIZE
