"""Configs: reading and checking them, building their components."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from finch import methods
from finch.errors import UserError, exit_with_a_sentence
from finch.names import did_you_mean, find_config
from finch.options import ALIASES, COMPONENT, FULL_FINETUNE, REFUSED, REQUIRED, Option

# Keys whose values are never shown. pad_token and the like are words of a tokenizer, not secrets.
_SECRETS = re.compile(
    r"^(?!(pad|bos|eos|unk|sep|cls|mask)_token$)(.*_)?(token|api_?key|access_key|auth|secret|secret_key|password)$",
    re.IGNORECASE,
)
_NOT_TEXT = re.compile(r"torchtune\.models\.(llama3_2_vision|clip|flux|t5)\.")
_SWEPT_LENGTH = 8  # shorter values may stand inside other words by chance


# Reading


def parse(options: Mapping[str, Option]) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Decorates a recipe's main function: ``--config NAME_OR_PATH [key=value ...] [~key]`` becomes its checked config."""

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[[], None]:
        @exit_with_a_sentence
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
            f"{path}: {_first_line(error)}; give the missing key on the command line or in the file"
        ) from error
    except ValueError as error:
        raise UserError(f"{_first_line(error)}; overrides are key=value, or ~key to remove one") from error
    except Exception as error:  # of the YAML reader, whose classes omegaconf does not re-export
        raise UserError(f"{path} cannot be read as YAML: {_first_line(error)}") from error
    if "lora" in names and options is FULL_FINETUNE:
        raise UserError(
            f"method={'+'.join(names)} trains adapters, which another recipe does: tune run finch_lora_finetune {' '.join(arguments)}"
        )
    cfg = check(cfg, options, own_keys=_referred(_file(path)))
    methods.tell(names, cfg)
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
        UserError: see :mod:`finch.methods`.
        ValueError: an override that is none.
    """
    from torchtune.config._utils import _merge_yaml_and_cli_args

    blocks, overrides, names = methods.over_file(in_file, overrides)
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


def check(cfg: DictConfig, options: Mapping[str, Option], own_keys: Collection[str] = ()) -> DictConfig:
    """Refuses unknown keys, wrong types and missing keys; fills in the defaults.

    A top-level key that other keys refer to, as ``${data_root}``, is the user's own and is let through; so are ``own_keys``, to
    which the file referred before an override took the reference away.

    Raises:
        UserError: names key, value and remedy.
    """
    drop_null_blocks(cfg)
    _translate(cfg)
    _check_kind(cfg)
    referred = _referred(cfg) | set(own_keys)
    for key in map(str, cfg):
        if key not in options and key not in referred:
            raise UserError(
                f"unknown key {key}={_short(cfg[key], key)}{did_you_mean(key, options) or '; see finch.options for the known ones'}"
            )
    for key, option in options.items():
        if option.block is not None:
            cfg[key] = _check_block(key, cfg.get(key), option.block)
            continue
        if option.kinds == COMPONENT and isinstance(cfg.get(key), str):
            cfg[key] = {"_component_": cfg[key]}  # torchtune's short form, `loss=torch.nn.CrossEntropyLoss`
        value = cfg.get(key)
        if isinstance(value, DictConfig) and isinstance(option.default, dict) and "_component_" not in value:
            value = cfg[key] = OmegaConf.merge(option.default, value)  # `loss.x=y` on top of the default
        if value is None:
            if option.default is REQUIRED:
                raise UserError(f"{key} is missing: {option.help}")
            if key not in cfg:
                cfg[key] = option.default
            elif option.default is not None and not option.nullable:
                raise UserError(f"{key} has no value: {option.help}; leave the key out for {_short(option.default)}")
            continue
        _check_value(key, value, option)
    for where, node in _components(cfg):
        _check_component(where, node)
    return cfg


def _translate(cfg: DictConfig) -> None:
    """Takes torchtune's other names for a key, and refuses those of its keys that finch does not have."""
    for theirs, ours in ALIASES.items():
        if theirs in cfg and ours not in cfg:
            cfg[ours] = cfg.pop(theirs)
    for key, refused in REFUSED.items():
        if key in cfg and (value := cfg.pop(key)) != refused.harmless:
            raise UserError(f"{key}={_short(value)}: {refused.instead}")


def _check_kind(cfg: DictConfig) -> None:
    """Ahead of everything else, since such a config differs in many other keys as well."""
    component = str(component_of(cfg.get("model")))
    if _NOT_TEXT.match(component):
        raise UserError(
            f"model._component_={component} is not a text decoder, which this recipe trains; give the builder of one"
        )


def drop_null_blocks(cfg: DictConfig) -> None:
    """Makes a block without a component null: `lr_scheduler=null` reaches it as `lr_scheduler._component_=null`."""
    for key in list(cfg):
        if isinstance(cfg._get_node(key), DictConfig) and "_component_" in cfg[key] and cfg[key]["_component_"] is None:
            cfg[key] = None


def redacted(cfg: DictConfig) -> DictConfig:
    """A copy, resolved, in which tokens, keys and passwords are starred; for everything that is written or logged."""

    secrets: set[str] = set()

    def star(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {name: star(value, str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [star(value) for value in node]
        if isinstance(node, str) and node and _SECRETS.match(key):
            if len(node) >= _SWEPT_LENGTH:
                secrets.add(node)
            return "***"
        return node

    def sweep(node: Any) -> Any:
        """A secret may also stand inside another value, by interpolation."""
        if isinstance(node, dict):
            return {name: sweep(value) for name, value in node.items()}
        if isinstance(node, list):
            return [sweep(value) for value in node]
        for secret in secrets if isinstance(node, str) else ():
            node = node.replace(secret, "***")
        return node

    return OmegaConf.create(sweep(star(OmegaConf.to_container(cfg, resolve=True))))


def as_config_of_its_own(cfg: DictConfig, options: Mapping[str, Option]) -> DictConfig:
    """The resolved config to keep beside a run: with another ``output_dir`` it starts the same run afresh there."""
    output = str(cfg.output_dir)

    def relative(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: relative(value) for name, value in node.items()}
        if isinstance(node, list):
            return [relative(value) for value in node]
        if isinstance(node, str) and (node == output or node.startswith(output + "/")):
            return "${output_dir}" + node[len(output) :]
        return node

    shown = OmegaConf.to_container(OmegaConf.masked_copy(redacted(cfg), list(options)))
    kept = {**relative(shown), "output_dir": output, "resume_from_checkpoint": False, "overwrite": False}
    return OmegaConf.create(kept)


# Components


def component_of(node: Any) -> str | None:
    """The dotted path under ``_component_``, or None where there is none."""
    return node.get("_component_") if isinstance(node, (dict, DictConfig)) else None


def locate(path: str, key: str) -> Any:
    """The object at a dotted path.

    Raises:
        UserError: there is none; names the nearest attribute.
    """
    from torchtune.config._errors import InstantiationError
    from torchtune.config._utils import _get_component_from_path

    try:
        return _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        parent, _, name = path.rpartition(".")
        near = did_you_mean(name, dir(sys.modules[parent])) if parent in sys.modules else ""
        if isinstance(error.__cause__, ImportError) and not isinstance(error.__cause__, ModuleNotFoundError):
            near = f" ({_first_line(error.__cause__)}); check that its package fits the installed ones"  # it is there, and broken
        raise UserError(
            f"{key}._component_={path} does not exist{near or '; check the dotted path and that its package is installed'}"
        ) from error


def build(node: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """``torchtune.config.instantiate`` whose failures name the config key.

    Raises:
        UserError: the component does not exist, refuses its arguments, or misses a file.
    """
    from torchtune import config

    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        return config.instantiate(node, *args, **kwargs)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{key}: file not found: {error.filename or _first_line(error)}; check the path") from error
    except ValueError as error:
        raise UserError(f"{key}: {_first_line(error)}") from error
    except Exception as error:  # whatever a user's component raises is about what the user wrote under this key
        raise UserError(
            f"{key}: {component_of(node)} cannot be built: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _referred(cfg: Any) -> set[str]:
    return set(re.findall(r"\$\{([A-Za-z_]\w*)", OmegaConf.to_yaml(cfg)))


def _components(node: Any, where: str = "") -> Iterator[tuple[str, DictConfig]]:
    if isinstance(node, DictConfig):
        if "_component_" in node:
            yield where, node
        for key in node:
            yield from _components(node._get_node(key), f"{where}.{key!s}" if where else str(key))
    elif isinstance(node, ListConfig):
        for place, item in enumerate(node):
            yield from _components(item, f"{where}[{place}]")


def _check_component(where: str, node: DictConfig) -> None:
    path = node["_component_"]
    if not isinstance(path, str):
        raise UserError(f"{where}._component_={path} must be a dotted path such as torch.optim.AdamW")
    if where == "profiler" and not node.get("enabled", False):
        return
    component = locate(path, where)
    if not callable(component):
        raise UserError(f"{where}._component_={path} is not a class or function")
    try:
        parameters = inspect.signature(component).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in map(str, node):
        if key != "_component_" and key not in parameters:
            known = ", ".join(name for name in parameters if name != "self")
            near = did_you_mean(key, parameters, prefix=f"{where}.")
            raise UserError(f"unknown key {where}.{key}{near or f'; {path} takes {known}'}")


def _check_block(key: str, node: Any, options: Mapping[str, Option]) -> DictConfig:
    """A block that is no component, its defaults filled in."""
    known = ", ".join(options)
    if node is None:
        node = DictConfig({})
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={_short(node)} must be a block with some of {known}")
    for name in map(str, node):
        if name not in options:
            near = did_you_mean(name, options, prefix=f"{key}.")
            raise UserError(f"unknown key {key}.{name}={_short(node[name], name)}{near or f'; {key} takes {known}'}")
    filled = {name: option.default if node.get(name) is None else node[name] for name, option in options.items()}
    for name, option in options.items():
        if filled[name] is not None:
            _check_value(f"{key}.{name}", filled[name], option)
    return DictConfig(filled)


def _check_value(key: str, value: Any, option: Option) -> None:
    plain: type = dict if isinstance(value, DictConfig) else list if isinstance(value, ListConfig) else type(value)
    if plain not in option.kinds and not (plain is int and float in option.kinds):
        if option.kinds == (dict,):
            raise UserError(f"{key}={_short(value)} must be a block with a _component_: {option.help}")
        raise UserError(
            f"{key}={_short(value)} must be {' or '.join(kind.__name__ for kind in option.kinds)}: {option.help}"
        )
    if plain is dict and dict in option.kinds and "_component_" not in value:
        raise UserError(f"{key} has no _component_: {option.help}")
    if option.minimum is not None and value < option.minimum:
        raise UserError(f"{key}={value} must be at least {option.minimum:g}: {option.help}")


def _short(value: Any, key: str = "") -> str:
    if isinstance(value, (DictConfig, ListConfig)):
        return "{...}" if isinstance(value, DictConfig) else "[...]"  # a block may hold secrets, and is long
    text = "***" if _SECRETS.match(key) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
