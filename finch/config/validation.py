"""Checks a recipe's config: its keys and values against the schema, its components against their arguments; fills in the defaults."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from pydantic import ValidationError

from finch.base.errors import UserError
from finch.config.instantiate import arguments_in_source, component_of, locate
from finch.config.key_search import format_default, key_hint
from finch.config.resolved import format_value, map_values
from finch.config.schema import ALIASES, NAME, REQUIRED, UNSUPPORTED_KEYS, Key, Keys, arguments_of, keys

WEIGHT = "weight"
"""How often an entry of a list of datasets is drawn; it is next to the entry's ``_component_`` and its arguments."""

PATHS = [
    *("output_dir", "checkpoint_dir", "path", "model_dir", "data_files"),
    *("log_dir", "cache", "adapter_checkpoint", "source"),
]
_MAX_NAME = 255
_BAD_NAME = "a name has only letters, digits, _ and -; rename it"
_NOT_TEXT_MODELS = re.compile(r"torchtune\.models\.(llama3_2_vision|clip|flux|t5)\.")


def check(
    cfg: DictConfig,
    model: type[Keys],
    user_keys: Collection[str] = (),
    on_error: Callable[[UserError], None] | None = None,
    *,
    imports: bool = True,
) -> DictConfig:
    """Checks keys, values and components; fills in the defaults.

    Args:
        cfg: changed in place.
        model: the recipe's keys.
        user_keys: other keys that are accepted, besides those that ``cfg`` refers to, as ``${data_root}``.
        on_error: called with each mistake; None raises the first one.
        imports: False looks at components as far as their sources say, which takes no time.

    Raises:
        UserError: names key, value and remedy.
    """
    for error in _errors(cfg, model, user_keys, imports):
        if on_error is None:
            raise error
        on_error(error)
    return cfg


def _errors(cfg: DictConfig, model: type[Keys], user_keys: Collection[str], imports: bool) -> Iterator[UserError]:
    """Each mistake in a config, whose defaults are filled in on the way."""
    known = keys(model)
    yield from _text_errors(cfg)
    drop_null_blocks(cfg)
    for alias, name in ALIASES.items():
        if alias in cfg and name not in cfg:
            cfg[name] = cfg.pop(alias)
    for key, unsupported in UNSUPPORTED_KEYS.items():
        if key in cfg and (value := cfg.pop(key)) != unsupported.no_op_value:
            yield UserError(f"{key}={format_value(value)}: {unsupported.remedy}")
    component = str(component_of(cfg.get("model")))
    if _NOT_TEXT_MODELS.match(component):  # early, since a multimodal config differs in many other keys as well
        yield UserError(
            f"model._component_={component} is not a text decoder, which this recipe trains; give the builder of one"
        )
    accepted = {*known, *referred_keys(cfg), *user_keys}
    for name in map(str, cfg):
        # A quoted name with a dot would pass for the key in a block that has this path.
        if name not in accepted or "." in name:
            hint = key_hint(name, top_level(model), _names_in_blocks(cfg, known, imports)) or "; see `finch list keys`"
            shown = MISSING if OmegaConf.is_missing(cfg, name) else format_value(cfg[name], name)
            yield UserError(f"unknown key {name}={shown}{hint}")
    # Of keys that are there: OmegaConf looks for names like an absent one, which takes a tenth of a millisecond.
    for name in filter(cfg.__contains__, top_level(model)):
        _expand_component(cfg, name, known[name])
    fill_in(cfg, model)
    yield from _value_errors(model, {name: _plain(cfg.get(name)) for name in top_level(model) if name in cfg})
    for name in top_level(model):
        if "named components" in known[name].expected:
            yield from _named_component_errors(name, cfg.get(name))
    for path, node in components(cfg):
        try:
            yield from _component_errors(path, node, top_level(model), imports)
        except UserError as error:
            yield error
    try:
        dataset_weights(cfg.get("dataset"))
    except UserError as error:
        yield error


def _text_errors(node: Any, path: str = "") -> Iterator[UserError]:
    """Texts that no system takes for a path."""
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        name = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}" if path else str(key)
        is_missing = OmegaConf.is_missing(node, key)
        if is_missing and (isinstance(node, ListConfig) or key == "_component_"):
            yield UserError(f"{name} is not set: give a value, or remove it")
            # Replaced, as in the cases below, so that later checks do not report it once more.
            node[key] = None
        value = None if is_missing else node[key]
        if isinstance(value, (DictConfig, ListConfig)):
            yield from _text_errors(value, name)
        elif isinstance(value, str) and (bad := re.search(r"[\0-\x1f\x7f]" if str(key) in PATHS else r"\0", value)):
            kind = "NUL" if bad[0] == "\0" else "control"
            yield UserError(
                f"{name}={value}: {'text' if kind == 'NUL' else 'a path'} has no {kind} character; remove it"
            )
            node[key] = value.replace(bad[0], "")
        elif isinstance(value, str) and str(key) in PATHS and max(map(len, os.fsencode(value).split(b"/"))) > _MAX_NAME:
            yield UserError(f"{name}={value}: a file's or folder's name has at most {_MAX_NAME} bytes; shorten it")
            node[key] = None


def drop_null_blocks(cfg: DictConfig) -> None:
    """Makes a block without a component null: `lr_scheduler=null` reaches it as `lr_scheduler._component_=null`."""
    for key in list(cfg):
        # The node as it is: cfg[key] would raise where the value is missing, or refers to a missing one.
        if isinstance(cfg._get_node(key), DictConfig) and "_component_" in cfg[key] and cfg[key]["_component_"] is None:
            # A constant rate decays as well.
            cfg[key] = {"decay": cfg[key].decay} if key == "lr_scheduler" and "decay" in cfg[key] else None


def referred_keys(cfg: Any) -> set[str]:
    """The keys that values of ``cfg`` refer to, as ``${key}``."""
    return set(re.findall(r"\$\{([A-Za-z_]\w*)", OmegaConf.to_yaml(cfg)))


def top_level(model: type[Keys]) -> list[str]:
    """The names of a model's keys, without those in blocks."""
    return [name for name in keys(model) if "." not in name]


def _plain(value: Any) -> Any:
    """A value without OmegaConf's types; one that is still missing is null."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    return map_values(value, lambda part, _: None if part == MISSING else part)


def _expand_component(cfg: DictConfig, name: str, key: Key) -> None:
    """Writes out torchtune's short form `loss=torch.nn.CrossEntropyLoss`, and puts `loss.x=y` on top of the default."""
    value = cfg.get(name)
    if key.is_component and isinstance(value, str):
        cfg[name] = {"_component_": value}
    elif isinstance(value, DictConfig) and isinstance(key.default, dict) and "_component_" not in value:
        cfg[name] = OmegaConf.merge(key.default, value)


def fill_in(cfg: DictConfig, model: type[Keys]) -> None:
    """Sets the defaults of keys that are absent, and of those in blocks; a named block that is null is left out."""
    known = keys(model)

    def filled(block: Any, path: str, names: Collection[str]) -> Any:
        if not isinstance(block, DictConfig):
            return block
        values = {name: known[f"{path}.{name}"].default for name in names}
        values |= {str(name): block.get(name) for name in block if name not in names or block.get(name) is not None}
        return {name: value for name, value in values.items() if value is not REQUIRED}

    for name in top_level(model):
        key, given = known[name], cfg.get(name) if name in cfg else None
        if key.is_named and isinstance(given, DictConfig):
            blocks = {str(each): given.get(each) for each in given if given.get(each) is not None}
            cfg[name] = {each: filled(block, f"{name}.NAME", key.block) for each, block in blocks.items()} or None
        elif key.block and (given is not None or not key.expected.endswith("null")):
            cfg[name] = filled(DictConfig({}) if given is None else given, name, key.block)
        elif name not in cfg and key.default is not REQUIRED:
            cfg[name] = key.default


def _value_errors(model: type[Keys], values: Mapping[str, Any], prefix: str = "") -> Iterator[UserError]:
    """Each key whose value a model refuses, once."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        # Pydantic names a problem for each member of a union; reversed twice, the first one is kept, in its order.
        problems = {_path(model, problem["loc"]): problem for problem in reversed(error.errors(include_url=False))}
        for path, problem in reversed(problems.items()):
            yield UserError(_message(model, path, problem["type"], values, prefix, problem.get("ctx", {})))


def _path(model: type[Keys], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The path of the key at pydantic's location, which goes on into the members of a union."""
    names = tuple(map(str, location))
    key = keys(model).get(names[0])
    return names[: 1 if key is None or not key.block else 3 if key.is_named else 2]


def _message(
    model: type[Keys], path: tuple[str, ...], problem: str, values: Mapping[str, Any], prefix: str, context: Any
) -> str:
    """What is wrong with a value, by pydantic's name of the problem, and what it must be."""
    known, name = keys(model), prefix + ".".join(path)
    first = known[path[0]]
    block_path = (path[0], "NAME") if first.is_named else (path[0],)
    is_inner = first.block and len(path) > len(block_path)
    key = known.get(".".join((*block_path, path[-1]))) if is_inner else first
    value: Any = values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else value
    shown = format_value(value, path[-1])
    if path[-1] == "[key]" or (problem == "string_pattern_mismatch" and first.is_named and not is_inner):
        return f"{name.removesuffix('.[key]')}: {_BAD_NAME}"
    if key is None:
        block = ".".join(path[:-1])
        hint = key_hint(name, first.block) or f"; {block} accepts {', '.join(first.block)}"
        return f"unknown key {name}={shown}{hint}"
    if key.default is REQUIRED and value is None:
        return f"{name} is missing: {key.help}"
    if value is None:
        return f"{name} has no value: {key.help}; leave the key out for {format_default(key)}"
    if problem == "value_error":  # one of the schema's own validators says why
        is_block = isinstance(value, dict)
        return f"{name} {context['error']}: {key.help}" if is_block else f"{name}={shown} {context['error']}"
    if key.block and len(path) == len(block_path):
        return f"{name}={shown} must be a block with some of {', '.join(key.block)}"
    if key.block:
        return f"{name}={shown} must be a mapping from names to blocks: {key.help}"
    expected = "a block with a _component_" if key.is_component else key.expected
    return f"{name}={shown} must be {expected}: {key.help}"


def _named_component_errors(path: str, node: Any) -> Iterator[UserError]:
    """The mistakes in a mapping from names to components or to lists of them."""
    if not isinstance(node, DictConfig) or "_component_" in node:
        return
    if not node:
        yield UserError(f"{path} has no _component_ and no named sets; give one, or set it to null")
    for name, value in ((str(key), node[key]) for key in node):
        is_component = isinstance(value, DictConfig) and "_component_" in value
        if not (is_component or isinstance(value, ListConfig)):
            yield UserError(
                f"{path} has no _component_, and {path}.{name}={format_value(value)} is none; give each name a block with a _component_"
            )
        for index, entry in enumerate(value if isinstance(value, ListConfig) else ()):
            if component_of(entry) is None or isinstance(entry, str):
                yield UserError(f"{path}.{name}[{index}]={format_value(entry)} must be a block with a _component_")
        if not re.fullmatch(NAME, name):
            yield UserError(f"{path}.{name}: {_BAD_NAME}")


def components(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Each block with a ``_component_``, after its dotted path."""
    if isinstance(node, DictConfig):
        if "_component_" in node:
            yield path, node
        for key in node:
            yield from components(node._get_node(key), f"{path}.{key!s}" if path else str(key))
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from components(item, f"{path}[{index}]")


def _component_errors(path: str, node: DictConfig, recipe_keys: Collection[str], imports: bool) -> Iterator[UserError]:
    name = node["_component_"]
    if not isinstance(name, str):
        raise UserError(f"{path}._component_={name} must be a dotted path such as torch.optim.AdamW")
    # A profiler that is off is never built, and its other keys are torchtune's affair.
    if path == "profiler" and not node.get("enabled", False):
        return
    component = locate(name, path) if imports else None
    if imports and not callable(component):
        raise UserError(f"{path}._component_={name} is not a class or function")
    if imports and WEIGHT in node and WEIGHT not in (_parameters(component, is_complete=False) or ()):
        _check_weight_place(path)  # here, since a dataset's builder may accept any argument
    parameters = _parameters(component) if imports else arguments_in_source(name)
    for key in map(str, node):
        is_own = key == "_component_" or re.fullmatch(rf"dataset\[\d+\] {WEIGHT}|lr_scheduler decay", f"{path} {key}")
        if parameters is not None and key not in parameters and not is_own:
            hint = key_hint(f"{path}.{key}", parameters, {option: option for option in recipe_keys})
            yield UserError(f"unknown key {path}.{key}{hint or f'; {name} accepts ' + ', '.join(parameters)}")
    arguments = arguments_of(name)
    for key in map(str, node):
        if OmegaConf.is_missing(node, key) and (arguments is None or key not in keys(arguments)):  # those have a help
            yield UserError(f"{path}.{key} is not set: give {path}.{key}=VALUE, or remove it")
            node[key] = None
    if arguments is not None:
        given = {key: value for key, value in _plain(node).items() if key in keys(arguments)}
        yield from _value_errors(arguments, given, f"{path}.")


def _parameters(component: Any, *, is_complete: bool = True) -> list[str] | None:
    """The names of a component's arguments; None if they are not known, or with ``is_complete`` if it accepts any."""
    try:
        parameters = inspect.signature(component).parameters.values()
    except (TypeError, ValueError):
        return None
    if is_complete and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.name != "self" and each.kind not in variadic]


def _names_in_blocks(cfg: DictConfig, known: Mapping[str, Key], imports: bool) -> dict[str, str]:
    """The dotted paths of the keys that the blocks of a config accept, by their last part; for suggestions."""
    paths = {path.rpartition(".")[2]: path for path in known if "." in path and ".NAME." not in path}
    blocks = [(path, node) for path, node in components(cfg) if path in known]
    # Names that the config itself has come before those that its components would take.
    for path, node in blocks:
        for name in map(str, node):
            paths.setdefault(name, f"{path}.{name}")
    for path, node in blocks:
        with contextlib.suppress(UserError):  # a component that does not exist has an error of its own
            component = str(node["_component_"])
            described = arguments_of(component)
            found = (
                _parameters(locate(component, path), is_complete=False) if imports else arguments_in_source(component)
            )
            for name in found or (keys(described) if described else ()):
                paths.setdefault(name, f"{path}.{name}")
    return {name: path for name, path in paths.items() if name not in (*known, "_component_")}


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


def _check_weight_place(path: str) -> None:
    """Refuses a ``weight`` of a single dataset or of validation data."""
    if path == "dataset":
        raise UserError(
            "unknown key dataset.weight; weights belong to the entries of a list: dataset: [{_component_: ..., weight: 0.95}, {_component_: ..., "
            "weight: 0.05}]"
        )
    if path.startswith("dataset_validation"):
        raise UserError(
            f"unknown key {path}.weight; only the entries of dataset have weights, since validation reads every row once; remove it"
        )
