"""From a config of TorchTitan's trainer to one that trains with FINCH."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torchtitan.trainer import Trainer

from finch.errors import UserError
from finch.titan.lr_scheduler import FinchLRSchedulersContainer
from finch.titan.trainer import FinchTrainer


def to_finch_config(config: Trainer.Config, **schedule: Any) -> FinchTrainer.Config:
    """A FINCH run of what ``config`` trains; ``config`` stays as it is.

        config = to_finch_config(llama3_8b(), eta_max=5e-5, init="dataset")

    The optimizer's ``lr`` is eta_base. Settings that FINCH cannot work with are refused when the trainer is built, since the command line
    may still change them.

    Args:
        config: of TorchTitan's trainer.
        schedule: fields of :class:`FinchLRSchedulersContainer.Config`.

    Raises:
        UserError: an unknown field, a config of another trainer's class, or one that is FINCH's already.
    """
    if isinstance(config, FinchTrainer.Config):
        raise UserError(
            "config has FINCH already: set the fields of config.lr_scheduler instead of converting it a second time"
        )
    if type(config) is not Trainer.Config:
        owner = getattr(config, "_owner", None)
        name = type(config).__qualname__ if owner is None else f"{owner.__name__}.Config"
        raise UserError(
            f"config={name}: its trainer may have a step of its own; derive a trainer from finch.titan.FinchTrainer instead"
        )
    known = [field.name for field in fields(FinchLRSchedulersContainer.FINCHConfig)]
    for key in schedule:
        if key not in known:
            raise UserError(f"{key}={schedule[key]!r} is no setting of FINCH; its settings are {', '.join(known)}")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["lr_scheduler"] = FinchLRSchedulersContainer.FINCHConfig(**schedule)
    return FinchTrainer.Config(**values)
