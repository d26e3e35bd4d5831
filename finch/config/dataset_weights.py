"""``weight``: how often the entries of ``dataset`` are drawn, beside each one's ``_component_`` and its arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from finch.config.resolved import format_value
from finch.errors import UserError

WEIGHT = "weight"


def dataset_weights(dataset: Any) -> list[float] | None:
    """The weights of a config's ``dataset``; None where it has none: one component, or a list that is concatenated.

    Raises:
        UserError: some entries have no weight, there is only one entry, or a weight is not a number above 0.
    """
    if not isinstance(dataset, (list, ListConfig)):
        return None
    weights = [entry.get(WEIGHT) if isinstance(entry, Mapping) else None for entry in dataset]
    given = [index for index, weight in enumerate(weights) if weight is not None]
    if not given:
        return None
    for index, weight in enumerate(weights):
        if weight is None:
            raise UserError(
                f"dataset[{index}] has no weight, but dataset[{given[0]}].weight={format_value(weights[given[0]])}: give every entry of the list a "
                "weight, or none"
            )
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not (weight > 0 and math.isfinite(weight)):
            raise UserError(
                f"dataset[{index}].weight={format_value(weight)} must be a number above 0: it is the entry's part of the samples; remove an entry "
                "that is not to be drawn"
            )
    if len(weights) == 1:
        raise UserError(
            f"dataset[0].weight={weights[0]}: dataset has one entry, which is every sample; remove weight, or add an entry"
        )
    return [float(weight) for weight in weights if weight is not None]


def without_weight(entry: Any) -> Any:
    """The component of an entry of a list of datasets."""
    if not isinstance(entry, DictConfig) or WEIGHT not in entry:
        return entry
    resolved: Any = OmegaConf.to_container(entry, resolve=True)  # a copy by itself loses what interpolations refer to
    return DictConfig({key: value for key, value in resolved.items() if key != WEIGHT})


def accepts_weight(path: str) -> bool:
    """Whether the component at a config path may have a ``weight`` that is not its own argument."""
    return re.fullmatch(r"dataset\[\d+\]", path) is not None


def check_weight_place(path: str) -> None:
    """Checks the place of a ``weight`` that is not an argument of its component.

    Raises:
        UserError: it stands beside a single dataset, or in the validation data.
    """
    if path == "dataset":
        raise UserError(
            "unknown key dataset.weight; weights belong to the entries of a list: dataset: [{_component_: ..., weight: 0.95}, {_component_: ..., "
            "weight: 0.05}]"
        )
    if path.startswith("dataset_validation"):
        raise UserError(
            f"unknown key {path}.weight; only the entries of dataset have weights, since validation reads every row once; remove it"
        )
