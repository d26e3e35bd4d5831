"""Components: from the dotted path under ``_component_`` to the object, with errors that name the config key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from finch.config.suggestions import did_you_mean
from finch.errors import UserError


def component_of(node: Any) -> str | None:
    """The dotted path under ``_component_``, or of torchtune's short form ``loss: torch.nn.CrossEntropyLoss``; None without one."""
    if isinstance(node, str):
        return node
    return node.get("_component_") if isinstance(node, Mapping) else None


def locate(path: str, key: str) -> Any:
    """The object at a dotted path.

    Raises:
        UserError: it does not exist; names the nearest attribute.
    """
    from torchtune.config._errors import InstantiationError
    from torchtune.config._utils import _get_component_from_path

    try:
        return _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        parent, _, name = path.rpartition(".")
        attributes = vars(sys.modules[parent]) if parent in sys.modules else {}
        hint = did_you_mean(name, [attribute for attribute, value in attributes.items() if callable(value)])
        if isinstance(error.__cause__, ImportError) and not isinstance(
            error.__cause__, ModuleNotFoundError
        ):  # it is broken
            hint = f" ({first_line(error.__cause__)}); check that its package fits the installed ones"
        raise UserError(
            f"{key}._component_={path} does not exist{hint or '; check the dotted path and that its package is installed'}"
        ) from error


def build(node: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """``torchtune.config.instantiate`` whose failures name the config key.

    Raises:
        UserError: the component does not exist, rejects its arguments, or needs a file that is missing.
    """
    from omegaconf import DictConfig, OmegaConf
    from torchtune import config

    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        return config.instantiate(node, *args, **kwargs)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{key}: file not found: {error.filename or first_line(error)}; check the path") from error
    except ValueError as error:
        raise UserError(f"{key}: {first_line(error)}") from error
    except Exception as error:  # anything a user's component raises concerns this key
        raise UserError(
            f"{key}: {component_of(node)} cannot be built: {type(error).__name__}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
