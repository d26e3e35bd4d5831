"""Checks of a config's keys, types and components, and its defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from finch.config.instantiate import component_of, locate
from finch.config.registry import did_you_mean
from finch.config.resolved import shown
from finch.config.schema import ALIASES, COMPONENT, REQUIRED, UNSUPPORTED_KEYS, Option
from finch.errors import UserError

_NOT_TEXT = re.compile(r"torchtune\.models\.(llama3_2_vision|clip|flux|t5)\.")


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
    referred = referred_keys(cfg) | set(own_keys)
    for key in map(str, cfg):
        if key not in options and key not in referred:
            raise UserError(
                f"unknown key {key}={shown(cfg[key], key)}{did_you_mean(key, options) or '; see finch.config.schema for the known ones'}"
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
                raise UserError(f"{key} has no value: {option.help}; leave the key out for {shown(option.default)}")
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
    for key, refused in UNSUPPORTED_KEYS.items():
        if key in cfg and (value := cfg.pop(key)) != refused.harmless:
            raise UserError(f"{key}={shown(value)}: {refused.instead}")


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


def referred_keys(cfg: Any) -> set[str]:
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
        raise UserError(f"{key}={shown(node)} must be a block with some of {known}")
    for name in map(str, node):
        if name not in options:
            near = did_you_mean(name, options, prefix=f"{key}.")
            raise UserError(f"unknown key {key}.{name}={shown(node[name], name)}{near or f'; {key} takes {known}'}")
    filled = {name: option.default if node.get(name) is None else node[name] for name, option in options.items()}
    for name, option in options.items():
        if filled[name] is not None:
            _check_value(f"{key}.{name}", filled[name], option)
    return DictConfig(filled)


def _check_value(key: str, value: Any, option: Option) -> None:
    plain: type = dict if isinstance(value, DictConfig) else list if isinstance(value, ListConfig) else type(value)
    if plain not in option.kinds and not (plain is int and float in option.kinds):
        if option.kinds == (dict,):
            raise UserError(f"{key}={shown(value)} must be a block with a _component_: {option.help}")
        raise UserError(
            f"{key}={shown(value)} must be {' or '.join(kind.__name__ for kind in option.kinds)}: {option.help}"
        )
    if plain is dict and dict in option.kinds and "_component_" not in value:
        raise UserError(f"{key} has no _component_: {option.help}")
    if option.minimum is not None and value < option.minimum:
        raise UserError(f"{key}={value} must be at least {option.minimum:g}: {option.help}")
