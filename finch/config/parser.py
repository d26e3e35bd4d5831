"""From the command line to a config: ``--config NAME_OR_PATH [key=value ...] [~key]``."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from finch.config import methods
from finch.config.instantiate import component_of, first_line
from finch.config.registry import find_config
from finch.config.schema import COMPONENT, FULL_FINETUNE, Option
from finch.config.validation import check, referred_keys
from finch.errors import UserError, report_user_errors


def parse(options: Mapping[str, Option]) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Decorates a recipe's main function: ``--config NAME_OR_PATH [key=value ...] [~key]`` becomes its checked config."""

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[[], None]:
        @report_user_errors
        @functools.wraps(main)
        def wrapper() -> None:
            main(read(sys.argv[1:], options))

        return wrapper

    return decorate


def read(arguments: list[str], options: Mapping[str, Option]) -> DictConfig:
    """A checked config, defaults filled in, from a recipe's command line.

    Raises:
        UserError: see ``find_config``, ``merge`` and ``check``; also a broken file or override.
    """
    from torchtune.config._parse import TuneRecipeArgumentParser

    # `--config=NAME` as well as `--config NAME`.
    parts = [argument.split("=", 1) if argument.startswith("--config=") else [argument] for argument in arguments]
    arguments = [part for pair in parts for part in pair]
    if "--config" not in arguments or arguments.index("--config") + 1 == len(arguments):
        raise UserError("--config NAME_OR_PATH is missing; `finch configs` lists the names")
    place = arguments.index("--config") + 1
    path = find_config(arguments[place])
    try:
        in_file, overrides = TuneRecipeArgumentParser().parse_known_args(
            [*arguments[:place], str(path), *arguments[place + 1 :]]
        )
        cfg, names = merge(vars(in_file), overrides)
        OmegaConf.to_container(cfg, resolve=True)
    except UserError:
        raise
    except OmegaConfBaseException as error:
        missing = re.search(r"Missing mandatory value: (\w+)", str(error))
        if missing:
            raise UserError(
                f"{missing[1]} is not set: add {missing[1]}=VALUE to the command; the header of {path} says what it is"
            ) from error
        raise UserError(
            f"{path}: {first_line(error)}; give the missing key on the command line or in the file"
        ) from error
    except ValueError as error:
        raise UserError(f"{first_line(error)}; overrides are key=value, or ~key to remove one") from error
    except Exception as error:  # of the YAML reader, whose classes omegaconf does not re-export
        raise UserError(f"{path} cannot be read as YAML: {first_line(error)}") from error
    if "lora" in names and options is FULL_FINETUNE:
        raise UserError(
            f"method={'+'.join(names)} trains adapters, which another recipe does: tune run finch_lora_finetune {' '.join(arguments)}"
        )
    cfg = check(cfg, options, own_keys=referred_keys(_file(path)))
    methods.log_method(names, cfg)
    return cfg


def recipe_for(name: str, overrides: list[str]) -> str:
    """The recipe that trains a config's model.

    Raises:
        UserError: there is no such config; what is wrong inside it is left to ``read``.
    """
    file = _file(find_config(name))
    try:
        in_file: Any = OmegaConf.to_container(file)
        return recipe_of(merge(in_file, overrides)[0])
    except Exception:  # told by the reading that follows
        return recipe_of(file)


def recipe_of(cfg: DictConfig) -> str:
    """The name of the recipe that trains a config's model, by the name of the model's builder."""
    builder = str(component_of(cfg.get("model"))).rpartition(".")[2]
    return "finch_lora_finetune" if builder.startswith("lora_") else "finch_full_finetune"


def merge(in_file: dict[str, Any], overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """One config from a file's keys, the method's blocks and the command line's ``key=value``, each over the one before.

    Returns:
        The config, without the key ``method``, and the names of the method, none without one.

    Raises:
        UserError: see :mod:`finch.config.methods`.
        ValueError: an override that is none.
    """
    from torchtune.config._utils import _merge_yaml_and_cli_args

    blocks, overrides, names = methods.apply_method(in_file, overrides)
    arguments = [_as_component(_without_block(override, blocks)) for override in overrides]
    cfg = _merge_yaml_and_cli_args(argparse.Namespace(**blocks), arguments)
    methods.complete(names, cfg, in_file, overrides)
    return cfg, names


def _without_block(override: str, in_file: Mapping[str, Any]) -> str:
    """Makes `~lr_scheduler` the null that torchtune's parser takes; by itself it removes no block with a component."""
    key = override.removeprefix("~")
    if override.startswith("~") and component_of(in_file.get(key)) is not None:
        return f"{key}=null"
    return override


def _as_component(override: str) -> str:
    """Makes `loss=PATH` the `loss._component_=PATH` that `loss.key=value` can stand beside, whatever the file has."""
    key, _, value = override.partition("=")
    is_block = key in FULL_FINETUNE and FULL_FINETUNE[key].kinds == COMPONENT
    return f"{key}._component_={value}" if is_block and "." in value and "{" not in value else override


def _file(path: Path) -> DictConfig:
    try:
        return DictConfig(OmegaConf.load(path))
    except Exception:  # told by the reading that follows
        return DictConfig({})
