"""From the command line to a checked config: ``--config NAME_OR_PATH [key=value ...] [~key]``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from finch.base import hub
from finch.base.errors import UsageError, UserError, report_user_errors
from finch.base.files import exists
from finch.base.log import logger
from finch.config import methods
from finch.config.instantiate import component_of, find_config, find_users_components, first_line, load_config, locate
from finch.config.key_search import recipe_help
from finch.config.resolved import format_override, map_values
from finch.config.schema import RECIPES, ROWS, FullFinetuneKeys, Keys, keys
from finch.config.validation import PATHS, check, components, referred_keys

SHORT_LIMIT = re.compile("^(max_seq_len|max_length)=")
_ENTRY = re.compile(r"([A-Za-z_][\w.]*)\[(\d+)\][\w.\[\]]*=")  # a key in an entry of a list
_METRIC_LOGGERS = {
    f"metric_logger={word}": f"metric_logger._component_={component}"
    for word, component in {
        "wandb": "torchtune.training.metric_logging.WandBLogger",
        "tensorboard": "torchtune.training.metric_logging.TensorBoardLogger",
        "trackio": "finch.training.metric_loggers.TrackioLogger",
        "csv": "finch.training.metric_loggers.CSVLogger",
    }.items()
}
AUTO_KEYS = {"model_dir", "data_files", "source"}
"""What the function under a config's key ``auto`` reads; other keys may refer to them."""


def parse(model: type[Keys]) -> Callable[[Callable[[DictConfig], Any]], Callable[..., None]]:
    """Decorates a recipe's main function: it gets the config that it is called with, or else reads the command line. ``--help`` prints what that
    accepts."""

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., None]:
        @report_user_errors
        @functools.wraps(main)
        def wrapper(cfg: DictConfig | None = None) -> None:
            if cfg is None and {"-h", "--help"} & set(sys.argv[1:]):
                if os.environ.get("RANK", "0") == "0":
                    print(recipe_help(Path(sys.argv[0]).stem, model))
                return
            main(read(sys.argv[1:], model) if cfg is None else cfg)

        return wrapper

    return decorate


def read(
    arguments: list[str],
    model: type[Keys] | None = None,
    on_error: Callable[[UserError], None] | None = None,
    ranks: int | None = None,
    look: Callable[[DictConfig], Iterable[UserError]] = lambda cfg: (),
    *,
    is_here: bool = True,
) -> DictConfig:
    """A checked config, defaults filled in, from a recipe's command line.

    Args:
        arguments: without the program's name.
        model: the recipe's keys; None: those of the recipe that trains the config's model.
        on_error: see ``check``.
        ranks: that the config is for, on all nodes; None: those that torchrun has started.
        look: what else is wrong with a config whose keys and values are right.
        is_here: False asks the hub for no data set's commit.

    Raises:
        UserError: what is found without an import that takes time, the last one if there are several; see ``find_config``, ``merge`` and ``check``; also a broken file or override.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parsed, overrides = parser.parse_known_args(arguments)
    if parsed.config is None:
        raise UsageError("--config NAME_OR_PATH is missing; `finch list configs` lists the names")
    path = find_config(parsed.config)
    find_users_components()
    if flags := [override for override in overrides if override.startswith("--")]:
        raise UsageError(f"{flags[0]} is no option; overrides are key=value, or ~key to remove one")
    keys = [override.partition("=")[0] for override in overrides]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        logger.warning(f"{', '.join(repeated)} on the command line more than once: the last value is taken")
    overrides = readable(overrides)
    file_cfg = load_config(path)
    given: tuple[Any, list[str]] = map_values(OmegaConf.to_container(file_cfg), lambda value, _: value), overrides
    user_keys = referred_keys(file_cfg) | (AUTO_KEYS if "auto" in file_cfg else set())
    errors: list[UserError] = []
    # The first time for what people mistype: before a download of weights, torch is imported, and rows are read.
    for is_last in (False, True):
        if not errors:
            file_blocks, overrides = hub.local_paths(*given, is_first_look=not is_last)
            with named_errors(path):
                blocks, chosen = complete(file_blocks, overrides, is_first_look=not is_last, ranks=ranks)
                # What auto adds later on can be removed only then.
                is_open = not is_last and "auto" in file_cfg
                cfg, names = merge(blocks, [each for each in overrides if not (is_open and each.startswith("~"))])
                OmegaConf.to_container(cfg, resolve=True)
            if "lora" in names and model is FullFinetuneKeys:
                command = shlex.join(["finch", "run", parsed.config, *map(format_override, overrides)])
                raise UserError(f"method={'+'.join(names)} trains adapters, by another recipe: {command}")
            for name, node in components(cfg) if is_last and is_here else ():
                # The paper's data sets read local files in place of their source.
                is_read = node.get("source") and (node.get("data_files") is None or node["_component_"] == ROWS)
                if is_read and str(node["_component_"]).startswith(("finch.", "torchtune.")):
                    node["source"] = hub.pinned(f"{name}.source", node["source"])
            check(cfg, model or RECIPES[recipe_of(cfg)], user_keys, errors.append, imports=is_last)
            errors += () if errors or is_last else look(cfg)
        if errors and on_error is None:
            raise errors[0]
        for error in errors if is_last else errors[:-1]:
            on_error(error)  # type: ignore[misc]
        if errors and not is_last:
            raise errors[-1]
    for message in chosen:
        logger.info(f"{parsed.config}: {message}")
    methods.log_method(names, cfg)
    return cfg


def save_for_ranks(cfg: DictConfig, folder: Path) -> Path:
    """Writes a config that was read, secrets and references included, for processes that :func:`read` it again; returns the file."""
    known = {*keys(RECIPES[recipe_of(cfg)]), *referred_keys(cfg)}
    # The others are the user's own, which nothing refers to any more: in a file such a key is unknown.
    OmegaConf.save(OmegaConf.masked_copy(cfg, [key for key in cfg if key in known]), folder / "config.yaml")
    return folder / "config.yaml"


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raises UserError for what omegaconf and torchtune's parser refuse in a config's file and overrides."""
    try:
        yield
    except UserError:
        raise
    except OmegaConfBaseException as error:
        if missing := re.search(r"Missing mandatory value: (\w+)", str(error)):
            raise UserError(
                f"{missing[1]} is not set: add {missing[1]}=VALUE to the command; the header of {path} describes it"
            ) from error
        reason = " ".join(first_line(error).split())[:200]
        raise UserError(
            f"{path}: {reason}; give the missing key on the command line or in the file, or correct the override"
        ) from error
    except (ValueError, TypeError) as error:  # the latter by omegaconf, of a list and a mapping
        kind = UsageError if "key=value" in str(error) else UserError
        raise kind(f"{first_line(error)}; overrides are key=value, or ~key to remove one") from error


def recipe_of(cfg: Mapping[Any, Any]) -> str:
    """The name of the recipe that trains a config's model, by the name of the model's builder."""
    builder = str(component_of(cfg.get("model"))).rpartition(".")[2]
    return "finch_lora_finetune" if builder.startswith("lora_") else "finch_full_finetune"


def complete(file_blocks: dict[str, Any], overrides: list[str], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The file's keys and those that the function under its key ``auto`` adds, and lines about what it chose.

    The function is named, not imported: it looks at models and data, which are above this package. ``options`` are its: in a first look
    it leaves open what the device and the rows tell; ``ranks``: as for :func:`read`.

    Raises:
        UserError: the function's, or there is no such function.
    """
    blocks = dict(file_blocks)
    name = blocks.pop("auto", None)
    return (blocks, []) if name is None else locate(str(name), "auto")(blocks, overrides, **options)


def readable(overrides: list[str]) -> list[str]:
    """Overrides whose values YAML would change or not read, such as ``a #b.jsonl`` or ``*.jsonl``, in its quotation marks, as the texts they are.
    Raises UserError for a path with ``${``, which omegaconf would resolve, and one that is not UTF-8."""
    return list(map(_readable, overrides))


def _readable(override: str) -> str:
    if re.search("[\ud800-\udfff]", override):
        raise UserError(f"{override} is not UTF-8; overrides are key=value, or ~key to remove one")
    key, _, value = override.partition("=")
    if not value or override.startswith("~"):
        return override
    if "${" in value and exists(value):
        raise UserError(f"{override}: configs take ${{...}} for another key's value; rename it, or name a link to it")
    signs = "\"'" if key.endswith(("_dir", "path")) else "\"'[{"  # others take lists
    is_path = key.rpartition(".")[2] in PATHS and value not in ("null", "None", "???") and value[0] not in signs
    is_text = is_path or (value[0] in "[{" and exists(value))
    return f"{key}={json.dumps(value, ensure_ascii=False)}" if _is_changed(value, is_text) else override


def _is_changed(value: str, is_text: bool) -> bool:
    """Whether YAML takes a text for another one or a number, or without ``is_text`` for a block, which the command line has as {...} and [...] only."""
    try:
        found: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except OmegaConfBaseException:  # named where the reference is resolved
        return False
    except yaml.YAMLError:
        return True
    found = found["value"]
    if is_text:
        return bool(found != value)
    if isinstance(found, str):
        return value[0] not in "\"'!" and found != value.strip()
    return isinstance(found, (dict, list)) and value[0] not in "{["


def merge(file_blocks: dict[str, Any], overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """One config from a file's keys, the method's blocks and the command line's ``key=value``; each overrides the one before.

    Returns:
        The config, without the key ``method``; the methods' names, empty without a method.

    Raises:
        UserError: see :mod:`finch.config.methods`.
        ValueError: an override is not ``key=value``.
    """
    blocks, overrides, names = methods.apply_method(file_blocks, overrides)
    if not _METRIC_LOGGERS.keys().isdisjoint(overrides):  # the place first: one that is given comes after it
        place = "metric_logger.log_dir=${output_dir}/logs"
        overrides = [place, *(_METRIC_LOGGERS.get(override, override) for override in overrides)]
    if blocks.keys().isdisjoint(("max_seq_len", "max_length")):
        overrides = [SHORT_LIMIT.sub("tokenizer.max_seq_len=", override) for override in overrides]
    in_lists = [override for override in overrides if _ENTRY.match(override)]
    dotlist: list[str] = []
    for override in (_expand_component(_remove_block(each, blocks)) for each in overrides if each not in in_lists):
        key, sign, value = override.partition("=")
        if override.startswith("~"):
            _remove(blocks, key[1:])
            continue
        if not sign:
            raise ValueError(f"Command-line overrides must be in the form of key=value, got {override}")
        # As torchtune's parser has them: the short form of a component, null, and a format of numbers that is no number.
        key += "._component_" if isinstance(blocks.get(key), dict) and component_of(blocks[key]) is not None else ""
        value = "!!null" if value == "None" else f"!!str {value}" if "max_filename" in key else value
        dotlist.append(f"{key}={value}")
    cfg = DictConfig(OmegaConf.merge(OmegaConf.create(blocks), OmegaConf.from_dotlist(dotlist)))
    for override in in_lists:
        _set_in_list(cfg, override)
    methods.resolve(names, cfg, overrides)
    return cfg, names


def _remove(blocks: dict[str, Any], key: str) -> None:
    """Removes a dotted key, and blocks that are empty then. Raises ValueError if there is no such key, or it is a component's block."""
    name, _, rest = key.partition(".")
    if not isinstance(blocks, dict) or name not in blocks:
        raise ValueError(f"Could not find key {key} in yaml config to remove")
    if rest:
        _remove(blocks[name], rest)
    if not rest or not blocks[name]:
        if name == "_component_" or (isinstance(blocks[name], dict) and component_of(blocks[name]) is not None):
            raise ValueError(f"Removing components from CLI is not supported: ~{key}")
        del blocks[name]


def _set_in_list(cfg: DictConfig, override: str) -> None:
    """Applies `dataset[1].weight=0.05`, which torchtune's parser takes for a mapping. Raises UserError if there is no such entry."""
    path, _, text = override.partition("=")
    match = _ENTRY.match(override)
    assert match is not None
    key, index = match[1], int(match[2])
    entries = OmegaConf.select(cfg, key)
    if not isinstance(entries, ListConfig):
        raise UserError(f"{format_override(override)}: {key} is not a list; use {key}.KEY=value")
    if index >= len(entries):
        raise UserError(f"{format_override(override)}: {key} has {len(entries)} entries, [0] to [{len(entries) - 1}]")
    OmegaConf.update(cfg, path, None if text == "None" else OmegaConf.from_dotlist([f"value={text}"])["value"])


def _remove_block(override: str, blocks: Mapping[str, Any]) -> str:
    """`~lr_scheduler` as `lr_scheduler=null`, since torchtune's parser does not remove a block with a component."""
    key = override.removeprefix("~")
    is_block = isinstance(blocks.get(key), dict) and component_of(blocks[key]) is not None
    return f"{key}=null" if override.startswith("~") and is_block else override


def _expand_component(override: str) -> str:
    """`loss=PATH` as `loss._component_=PATH`, which merges with `loss.key=value`."""
    key, _, value = override.partition("=")
    is_component = key in keys(FullFinetuneKeys) and keys(FullFinetuneKeys)[key].is_component
    return f"{key}._component_={value}" if is_component and "." in value and "{" not in value else override
