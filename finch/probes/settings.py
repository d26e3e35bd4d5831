"""The keys ``probes``, ``forgetting_budget`` and ``select_by``, checked against each other before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from finch.config.instantiate import did_you_mean, locate
from finch.config.schema import Budget, Probe
from finch.data.training_data import validation_sets
from finch.errors import UserError
from finch.log import logger
from finch.objectives import DFT, STM, TALR

KINDS_WITH_ACCURACY, KINDS_WITH_KL = ("multiple_choice",), ("self",)


def read_probes(cfg: DictConfig) -> dict[str, Probe]:
    """The settings of each probe by name; empty without probes."""
    blocks: Any = {} if cfg.probes is None else OmegaConf.to_container(cfg.probes, resolve=True)
    return {name: Probe(**block) for name, block in blocks.items()}


def read_budget(cfg: DictConfig) -> Budget | None:
    """The budget, or None without one."""
    block: Any = cfg.forgetting_budget
    return None if block is None else Budget.model_validate(OmegaConf.to_container(block, resolve=True))


def check_probes(cfg: DictConfig) -> None:
    """Checks what can be known of probes, budget and ``select_by`` without reading rows. Raises UserError for a probe without rows, a name
    that a validation set has as well, a budget or a selection that refers to nothing."""
    probes, validations = read_probes(cfg), validation_sets(cfg.dataset_validation)
    for name, probe in probes.items():
        if probe.source is None and probe.data_files is None:
            raise UserError(
                f"probes.{name} has no rows: set probes.{name}.data_files to a file, or probes.{name}.source to a name on the hub"
            )
        if f"validation/{name}/loss" in validations:
            raise UserError(f"probes.{name} and dataset_validation.{name} have the same name; rename one")
    budget = read_budget(cfg)
    if budget is not None:
        if budget.probe not in probes:
            raise UserError(f"forgetting_budget.probe={budget.probe}: {_no_probe(budget.probe, probes)}")
        if budget.metric == "kl" and probes[budget.probe].kind not in KINDS_WITH_KL:
            raise UserError(
                f"forgetting_budget.metric=kl needs a probe of kind self, and probes.{budget.probe}.kind={probes[budget.probe].kind}; set metric=loss"
            )
    if cfg.probes_every_n_steps is not None and not probes:
        raise UserError(f"probes_every_n_steps={cfg.probes_every_n_steps} needs probes; there are none: set it to null")
    if cfg.select_by is not None:
        _check_selection(cfg.select_by, probes, validations)


def selection_key(cfg: DictConfig, kinds: dict[str, str]) -> str | None:
    """The metric that the best epoch is chosen by; None: there is none to choose by. Raises UserError if ``select_by`` names a metric that
    the probe's kind does not have."""
    if cfg.select_by is not None:
        match = re.fullmatch(r"probe/([^/]+)/(accuracy|kl)", cfg.select_by)
        if match is not None:
            needed = KINDS_WITH_ACCURACY if match[2] == "accuracy" else KINDS_WITH_KL
            if kinds[match[1]] not in needed:
                raise UserError(
                    f"select_by={cfg.select_by}: probes.{match[1]} is of kind {kinds[match[1]]}, which has no {match[2]}; use probe/{match[1]}/loss"
                )
        return str(cfg.select_by)
    validation = next(iter(validation_sets(cfg.dataset_validation)), None)
    loss = locate(cfg.loss["_component_"], "loss")
    if loss not in (DFT, STM, TALR):
        return validation
    task = next((name for name, probe in read_probes(cfg).items() if probe.task), None)
    if task is not None:
        return f"probe/{task}/" + ("accuracy" if kinds[task] in KINDS_WITH_ACCURACY else "loss")
    if validation is not None and not cfg.save_last_epoch_only:
        logger.warning(
            f"RUN/best is chosen by {validation}, a raw cross-entropy, which picks the least trained epoch with {loss.__name__}: mark a probe of the "
            "task with probes.NAME.task=True, or set select_by"
        )
    return validation


def _check_selection(select_by: str, probes: dict[str, Probe], validations: Iterable[str]) -> None:
    kind, *rest = select_by.split("/")
    if kind != "probe":
        if select_by not in validations:
            known = ", ".join(validations) or "none, since there is no dataset_validation"
            raise UserError(f"select_by={select_by}: there is no such validation loss; known are {known}")
        return
    name, metric = rest
    if name not in probes:
        raise UserError(f"select_by={select_by}: {_no_probe(name, probes)}")
    needed = {"accuracy": KINDS_WITH_ACCURACY, "kl": KINDS_WITH_KL}.get(metric)
    if needed is not None and probes[name].kind not in ("auto", *needed):
        raise UserError(
            f"select_by={select_by}: probes.{name}.kind={probes[name].kind} has no {metric}, which kind {needed[0]} has; use probe/{name}/loss"
        )


def _no_probe(name: str, probes: Iterable[str]) -> str:
    names = list(probes)
    if not names:
        return "there are no probes; add one under probes"
    return f"there is no probe {name}{did_you_mean(name, names) or '; the probes are ' + ', '.join(names)}"
