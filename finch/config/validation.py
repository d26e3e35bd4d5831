"""Checks a config's keys, values and components against the schema, and fills in the defaults."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from finch.config.dataset_weights import WEIGHT, accepts_weight, check_weight_place, dataset_weights
from finch.config.instantiate import component_of, locate
from finch.config.resolved import format_value
from finch.config.schema import ALIASES, REQUIRED, UNSUPPORTED_KEYS, Option
from finch.config.unknown_keys import key_hint
from finch.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of a metric's name and of a file's
_NOT_TEXT_MODELS = re.compile(r"torchtune\.models\.(llama3_2_vision|clip|flux|t5)\.")


def check(
    cfg: DictConfig,
    options: Mapping[str, Option],
    user_keys: Collection[str] = (),
    on_error: Callable[[UserError], None] | None = None,
) -> DictConfig:
    """Checks keys, values and components; fills in the defaults.

    Args:
        cfg: changed in place.
        options: the recipe's keys.
        user_keys: other keys that are accepted, beside those that ``cfg`` refers to, as ``${data_root}``.
        on_error: called with each mistake; None raises the first one.

    Raises:
        UserError: names key, value and remedy.
    """
    for error in _errors(cfg, options, user_keys):
        if on_error is None:
            raise error
        on_error(error)
    return cfg


def _errors(cfg: DictConfig, options: Mapping[str, Option], user_keys: Collection[str]) -> Iterator[UserError]:
    """Each mistake in a config, whose defaults are filled in on the way."""
    drop_null_blocks(cfg)
    _apply_aliases(cfg)
    yield from _drop_unsupported_keys(cfg)
    component = str(component_of(cfg.get("model")))
    if _NOT_TEXT_MODELS.match(component):  # early, since a multimodal config differs in many other keys as well
        yield UserError(
            f"model._component_={component} is not a text decoder, which this recipe trains; give the builder of one"
        )
    known = {*options, *referred_keys(cfg), *user_keys}
    for key in map(str, cfg):
        if key not in known:
            hint = key_hint(key, options, _names_in_blocks(cfg, options)) or "; see `finch keys`"
            yield UserError(f"unknown key {key}={format_value(cfg[key], key)}{hint}")
    for key, option in options.items():
        try:
            _check_key(cfg, key, option)
        except UserError as error:
            yield error
    for path, node in _components(cfg):
        try:
            yield from _component_errors(path, node, options)
        except UserError as error:
            yield error
    try:
        dataset_weights(cfg.get("dataset"))
    except UserError as error:
        yield error


def _check_key(cfg: DictConfig, key: str, option: Option) -> None:
    """Checks the value of one of the recipe's keys, or sets its default."""
    if option.named_block is not None:
        cfg[key] = _check_named_blocks(key, cfg.get(key), option)
        return
    if option.block is not None:
        is_absent = option.default is None and cfg.get(key) is None
        cfg[key] = None if is_absent else _check_block(key, cfg.get(key), option.block)
        return
    if option.is_component and isinstance(cfg.get(key), str):
        cfg[key] = {"_component_": cfg[key]}  # torchtune's short form, `loss=torch.nn.CrossEntropyLoss`
    value = cfg.get(key)
    if isinstance(value, DictConfig) and isinstance(option.default, dict) and "_component_" not in value:
        value = cfg[key] = OmegaConf.merge(option.default, value)  # `loss.x=y` on top of the default
    if value is None:
        if option.default is REQUIRED:
            raise UserError(f"{key} is missing: {option.help}")
        if key not in cfg:
            cfg[key] = option.default
        elif not option.is_nullable:
            raise UserError(f"{key} has no value: {option.help}; leave the key out for {format_value(option.default)}")
        return
    _check_value(key, value, option)


def _apply_aliases(cfg: DictConfig) -> None:
    for alias, key in ALIASES.items():
        if alias in cfg and key not in cfg:
            cfg[key] = cfg.pop(alias)


def _drop_unsupported_keys(cfg: DictConfig) -> Iterator[UserError]:
    for key, unsupported in UNSUPPORTED_KEYS.items():
        if key in cfg and (value := cfg.pop(key)) != unsupported.no_op_value:
            yield UserError(f"{key}={format_value(value)}: {unsupported.remedy}")


def drop_null_blocks(cfg: DictConfig) -> None:
    """Makes a block without a component null: `lr_scheduler=null` reaches it as `lr_scheduler._component_=null`."""
    for key in list(cfg):
        if isinstance(cfg._get_node(key), DictConfig) and "_component_" in cfg[key] and cfg[key]["_component_"] is None:
            cfg[key] = None


def referred_keys(cfg: Any) -> set[str]:
    """The keys that values of ``cfg`` refer to, as ``${key}``."""
    return set(re.findall(r"\$\{([A-Za-z_]\w*)", OmegaConf.to_yaml(cfg)))


def _check_block(key: str, node: Any, options: Mapping[str, Option]) -> DictConfig:
    """A block without a component, its defaults filled in."""
    known = ", ".join(options)
    if node is None:
        node = DictConfig({})
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={format_value(node)} must be a block with some of {known}")
    for name in map(str, node):
        if name not in options:
            hint = key_hint(f"{key}.{name}", options) or f"; {key} accepts {known}"
            raise UserError(f"unknown key {key}.{name}={format_value(node[name], name)}{hint}")
    for name, option in options.items():
        if option.default is REQUIRED and node.get(name) is None:
            raise UserError(f"{key}.{name} is missing: {option.help}")
    filled = {name: option.default if node.get(name) is None else node[name] for name, option in options.items()}
    for name, option in options.items():
        if filled[name] is not None:
            _check_value(f"{key}.{name}", filled[name], option)
    return DictConfig(filled)


def _check_named_blocks(key: str, node: Any, option: Option) -> DictConfig | None:
    """A mapping from names to blocks without components, their defaults filled in; a block that is null is left out."""
    assert option.named_block is not None
    if node is None:
        return None
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={format_value(node)} must be a mapping from names to blocks: {option.help}")
    blocks = {}
    for name in map(str, node):
        if not _NAME.fullmatch(name):
            raise UserError(f"{key}.{name}: a name has letters, digits, _ and - alone; rename it")
        if node[name] is not None:
            blocks[name] = _check_block(f"{key}.{name}", node[name], option.named_block)
    return DictConfig(blocks) if blocks else None


def _check_value(key: str, value: Any, option: Option) -> None:
    plain = {} if isinstance(value, DictConfig) else [] if isinstance(value, ListConfig) else value
    if isinstance(plain, str) and plain in option.unsupported:
        raise UserError(f"{key}={plain} {option.unsupported[plain]}")
    if not option.accepts(plain):
        expected = "a block with a _component_" if option.is_component else option.expected
        raise UserError(f"{key}={format_value(value)} must be {expected}: {option.help}")
    if option.block is None and isinstance(value, DictConfig) and "_component_" not in value:
        if not option.is_named:
            raise UserError(f"{key} has no _component_: {option.help}")
        _check_named_components(key, value)


def _check_named_components(path: str, node: DictConfig) -> None:
    if not node:
        raise UserError(f"{path} has no _component_ and no named sets; give one, or set it to null")
    for name, value in ((str(key), node[key]) for key in node):
        is_component = isinstance(value, DictConfig) and "_component_" in value
        if not (is_component or isinstance(value, ListConfig)):
            raise UserError(
                f"{path} has no _component_, and {path}.{name}={format_value(value)} is none; give each name a block with a _component_"
            )
        if not _NAME.fullmatch(name):
            raise UserError(f"{path}.{name}: a name has letters, digits, _ and - alone; rename it")


def _components(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    if isinstance(node, DictConfig):
        if "_component_" in node:
            yield path, node
        for key in node:
            yield from _components(node._get_node(key), f"{path}.{key!s}" if path else str(key))
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _components(item, f"{path}[{index}]")


def _component_errors(path: str, node: DictConfig, options: Mapping[str, Option]) -> Iterator[UserError]:
    name = node["_component_"]
    if not isinstance(name, str):
        raise UserError(f"{path}._component_={name} must be a dotted path such as torch.optim.AdamW")
    if path == "profiler" and not node.get("enabled", False):
        return
    component = locate(name, path)
    if not callable(component):
        raise UserError(f"{path}._component_={name} is not a class or function")
    if WEIGHT in node and WEIGHT not in (_parameters(component, is_complete=False) or ()):
        check_weight_place(path)  # here, since a dataset's builder may accept any argument
    parameters = _parameters(component)
    if parameters is None:
        return
    known = ", ".join(parameters)
    for key in map(str, node):
        if key == WEIGHT and accepts_weight(path):
            continue
        if key != "_component_" and key not in parameters:
            hint = key_hint(f"{path}.{key}", parameters, {option: option for option in options})
            yield UserError(f"unknown key {path}.{key}{hint or f'; {name} accepts {known}'}")


def _parameters(component: Callable[..., Any], *, is_complete: bool = True) -> list[str] | None:
    """The names of a component's arguments; None if they are not known, or with ``is_complete`` if it accepts any."""
    try:
        parameters = inspect.signature(component).parameters.values()
    except (TypeError, ValueError):
        return None
    if is_complete and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.name != "self" and each.kind not in variadic]


def _names_in_blocks(cfg: DictConfig, options: Mapping[str, Option]) -> dict[str, str]:
    """The dotted paths of the keys that the blocks of a config accept, by their last part; for suggestions."""
    paths = {
        name: f"{key}.{name}" for key, option in options.items() if option.block is not None for name in option.block
    }
    blocks = [(path, node) for path, node in _components(cfg) if path in options]
    for path, node in blocks:
        for name in map(str, node):
            paths.setdefault(name, f"{path}.{name}")
    for path, node in blocks:
        with contextlib.suppress(UserError):  # a component that does not exist has an error of its own
            component = locate(str(node["_component_"]), path)
            for name in (callable(component) and _parameters(component, is_complete=False)) or ():
                paths.setdefault(name, f"{path}.{name}")
    return {name: path for name, path in paths.items() if name not in (*options, "_component_")}
