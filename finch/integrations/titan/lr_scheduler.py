"""FINCH in the place of TorchTitan's learning-rate schedulers."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from finch import FinchLR
from finch.base.errors import UserError
from finch.base.log import logger
from finch.optim.finch_lr import ETA_MAX
from finch.optim.optimizer_variants import on_local_shards

SCHEDULE_KEYS = ("eta_max", "eta_base", "ema", "eps", "on_nonfinite", "max_nonfinite", "warmup_steps")
"""Of a ``FINCHConfig``, those that FinchLR has under the same name, with the same meaning."""


class FinchLRSchedulersContainer(LRSchedulersContainer):
    """Sets the learning rate of all optimizers before their step, from the loss of that step.

    TorchTitan calls ``step()`` after the update and without a loss, so that here it does nothing: the trainer calls ``set_lr``. The state
    is FinchLR's, plain numbers that TorchTitan's checkpoints hold as ``lr_scheduler.*``.

    Fused optimizers get their learning rate as a 0-d tensor on the device of their parameters: FINCH then never waits for a GPU, and a
    non-finite step is skipped inside the optimizer. Raises UserError if a setting is out of range.

    Attributes:
        init: Lbar_0 as configured, in nats or by its name.
        has_state: whether a checkpoint was loaded.
    """

    @dataclass(kw_only=True, slots=True)
    class FINCHConfig(LRSchedulersContainer.Config):
        """Of TorchTitan's fields ``warmup_steps``, ``decay_ratio``, to 0, and ``total_steps`` have an effect; the others keep their defaults."""

        warmup_steps: int = 0
        """Of these first updates the i-th takes i / warmup_steps of the rate; the paper's FINCH has none."""

        eta_max: float | Literal["auto"] = ETA_MAX
        """Cap of the learning rate; ``auto`` is 2.5 x eta_base. The paper's 5e-5 is for rates around 2e-5."""

        init: float | Literal["dataset", "first_batch"] = "dataset"
        """Where the average starts, in nats: the mean loss over the training rows (one pass before the first step), the first loss, or a number."""

        eta_base: float | None = None
        """Learning rate at a loss of 1 nat. None: the ``lr`` of the optimizer's first param group."""

        ema: float = 0.9
        """Weight of the past in the moving average of the loss."""

        eps: float = 1e-8
        """Added to the average under the root, in nats."""

        on_nonfinite: Literal["raise", "skip"] = "raise"
        """What a non-finite loss or gradient does: end the run, or skip the update."""

        max_nonfinite: int = 10
        """How many non-finite losses in a row end the run under ``skip``."""

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> FinchLRSchedulersContainer:
            return FinchLRSchedulersContainer(self, optimizers, training_steps)

    Config = FINCHConfig

    def __init__(self, config: FINCHConfig, optimizers: OptimizersContainer, training_steps: int) -> None:
        self._config, self._optimizers, self._steps = config, list(optimizers), training_steps
        self._has_tensor_lr = all(map(_is_fused, self._optimizers))
        for optimizer in self._optimizers if self._has_tensor_lr else ():
            # torch sets it where `fused` is an argument of the optimizer; TorchTitan gives it to the param groups.
            vars(optimizer).update(_step_supports_amp_scaling=True)
            on_local_shards(optimizer)
        self.init = config.init
        self.schedule = build_schedule(config, self._optimizers, training_steps)
        self._hold_lr_as_tensors()  # now that eta_base is read: the tensors have fp32's digits
        self.schedulers = [self.schedule]
        self.has_state = False

    def start(self, mean_loss: float) -> None:
        """Starts the average at ``mean_loss``, in nats: ``init: dataset``."""
        options = {"init": mean_loss, "eta_base": self.schedule.eta_base}
        self.schedule = build_schedule(self._config, self._optimizers, self._steps, **options)
        self.schedulers = [self.schedule]

    def set_lr(self, loss: torch.Tensor, targets: torch.Tensor) -> bool:
        """Sets the learning rate of the step whose loss is given; errors as in :meth:`finch.FinchLR.step`.

        ``loss``: [] mean cross-entropy over the target tokens of the step in nats, of all ranks; NaN also where a gradient is not finite;
        ``targets``: [] their number. Returns whether to take the step; True where the optimizers decide by themselves.
        """
        self._hold_lr_as_tensors()  # a loaded state replaces the param groups
        return self.schedule.step(loss, targets)

    def step(self) -> None:
        """Nothing: see the class."""

    def get_metrics(self) -> dict[str, float]:
        """Nothing: TorchTitan asks before the step, whose rate is not known then. The trainer's RunMetrics adds it to what is logged."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._hold_lr_as_tensors()
        self.schedule.load_state_dict(state_dict)
        self.has_state = True

    def _hold_lr_as_tensors(self) -> None:
        if not self._has_tensor_lr:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it skips a step by ``found_inf``; with parameters on one device, since a captured step cannot move its learning rate."""
    groups = optimizer.param_groups
    devices = {parameter.device for group in groups for parameter in group["params"]}
    return len(devices) == 1 and all(group.get("fused") for group in groups)


def build_schedule(
    config: FinchLRSchedulersContainer.FINCHConfig,
    optimizers: list[torch.optim.Optimizer],
    training_steps: int,
    *,
    init: float | None = None,
    eta_base: float | None = None,
) -> FinchLR:
    """The FinchLR of a config. ``init``: Lbar_0 in nats, once it is known; None: as configured, and ``dataset`` waits for it.

    Raises UserError if a setting is out of range.
    """
    start: float | str = config.init if init is None else init
    options = {key: getattr(config, key) for key in SCHEDULE_KEYS} | (
        {} if eta_base is None else {"eta_base": eta_base}
    )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule = FinchLR(
                optimizers,
                init="first_batch" if start == "dataset" else start,
                decay=config.decay_ratio or 0.0,
                total_steps=config.total_steps or training_steps,
                **options,
            )
    except ValueError as error:
        raise UserError(f"lr_scheduler: {error}") from error
    for warning in caught:
        logger.warning(str(warning.message))
    if isinstance(start, float) and math.isfinite(start):
        logger.info(
            f"FINCH: eta_base {schedule.eta_base:g}, eta_max {schedule.eta_max:g} "
            f"(reached below {(schedule.eta_base / schedule.eta_max) ** 2:.2g} nats), ema {schedule.ema:g}, EMA starts at {start:.4f} nats"
        )
    return schedule
