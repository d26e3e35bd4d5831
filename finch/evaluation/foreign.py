"""Configs of finished runs, which somebody else may have written: data. No resolver runs, only what foreign.yaml lists is imported, and only files of
this machine are read."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from finch.base import run_files
from finch.base.errors import UserError
from finch.config.instantiate import find_users_components, first_line, load_config, replace_references
from finch.config.resolved import format_value
from finch.config.schema import ROWS, LoraFinetuneKeys

_KEYS = {field.alias or name for name, field in LoraFinetuneKeys.model_fields.items()}
_SOLUTIONS = "finch.data.sciknoweval.sciknoweval_solutions_dataset"
_KINDS = ("json", "csv", "parquet", "arrow", "text")


def read_data(file: Path) -> dict[str, Any]:
    """A config as plain data, with what its references refer to in their place.

    Raises UserError for a broken file, see ``load_config``, and for a value that is more than a number, a text, a list or a block.
    """
    from omegaconf import OmegaConf

    blocks: dict[str, Any] = replace_references(OmegaConf.to_container(load_config(file)))
    for path, _, node in _nodes(blocks):
        # What replace_references has left calls a resolver, or refers to nothing.
        if "${" in path or (isinstance(node, str) and "${" in node):
            raise UserError(f"{file}: {path}={format_value(node)} asks for more than another key; write the value")
        if not isinstance(node, (str, int, float, list, dict, type(None))):
            raise UserError(f"{file}: {path} is a {type(node).__name__}, no number and no text; write one")
    return blocks


def read_config_of(run: Path, unused: Collection[str] = (), *, trust: bool = False) -> dict[str, Any]:
    """RUN/config.yaml as data, without the keys ``unused``, which may have anything: nobody sees it.

    ``trust``: the run is the user's own: its config counts as one that is named on the command line, and components in the current folder as well.

    Raises UserError as :func:`read_data`, and for a key that no saved config has, a component or an argument that foreign.yaml does not list, and
    files or rows that are not of this machine.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = run / run_files.CONFIG
    if not file.is_file():
        raise UserError(f"{file} does not exist; give the folder of a run, which has it from its first step on")
    if trust:
        find_users_components()
        try:
            blocks: Any = OmegaConf.to_container(load_config(file), resolve=True)
        except OmegaConfBaseException as error:
            raise UserError(f"{file}: {first_line(error)}; restore the file") from error
        return {str(key): block for key, block in blocks.items() if key not in unused}
    blocks = {key: block for key, block in read_data(file).items() if key not in unused}
    for path, key, node in _nodes(blocks):
        if problem := _problem(path, key, node):
            raise UserError(
                f"{file}: {path}={format_value(node, key)} {problem}; --trust takes the config of a run of your own as it is"
            )
    return blocks


def _nodes(node: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each value with its dotted path and its key; one of a list has the list's."""
    if path:
        yield path, key, node
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _nodes(value, f"{path}.{name}" if path else name, name)
    for number, value in enumerate(node if isinstance(node, list) else ()):
        yield from _nodes(value, f"{path}[{number}]", key)


def _problem(path: str, key: str, node: Any) -> str | None:
    """Why a value of somebody else's config is not used."""
    components, arguments = _lists()
    first = re.split(r"[.\[]", path)[0]
    if first not in _KEYS:
        return "is no key that finch saves"
    if isinstance(node, dict):
        component, is_probe = str(node.get("_component_", "")), re.fullmatch(r"probes\.[^.\[]+", path)
        if component not in components.get(first, ()) and not is_probe:
            return None  # _component_ itself is refused
        if unknown := [name for name in node if name not in arguments.get(first, node)]:
            return f"has {unknown[0]}, which is not among the arguments that somebody else's run may give"
        is_rows = is_probe or first.startswith("dataset")
        return None if not is_rows or _is_local(component, node) else "has rows that are in no local file"
    if not isinstance(node, str):
        return None
    if key == "_component_" or (path in components and node) or key == "prompt_template":
        is_listed = key != "prompt_template" and node in components.get(first, ())
        return None if is_listed else "is not among the components that somebody else's run may name"
    # URLs, chains of fsspec such as zip::FILE, data URLs, and patterns that search the whole disk; a system prompt is free text.
    if key != "new_system_prompt" and re.search(r"://|::|^data:|^/[^/]*[*?[]", node):
        return "is no path of this machine"
    with contextlib.suppress(OSError, ValueError):  # most texts are no path
        # A pipe would keep its reader waiting, and a device may have no end.
        if stat.S_IFMT(os.stat(node).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            return "is neither a file nor a folder"
    return None


def _is_local(component: str, rows: Mapping[str, Any]) -> bool:
    source, is_finch = rows.get("source"), component.startswith("finch.")
    if rows.get("kind") == "self" and source is None:
        return True  # of finch's prompts, where there is no file
    if not rows.get("data_files") or (component == _SOLUTIONS and not rows.get("questions")):
        return False
    return source in _KINDS or (source is None and (is_finch or not component)) or (is_finch and component != ROWS)


@functools.cache
def _lists() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Components and arguments, by key."""
    import yaml

    lists = yaml.safe_load(resources.files(__package__).joinpath("foreign.yaml").read_text(encoding="utf-8"))
    components = {
        key: {f"{module}.{name}" for module, names in modules.items() for name in names.split()}
        for key, modules in lists["components"].items()
    }
    return components, {key: {"_component_", *names.split()} for key, names in lists["arguments"].items()}


_REACHING = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")
_inside: list[None] = []  # an entry per `offline` that has not ended


@contextlib.contextmanager
def offline(is_on: bool = True) -> Iterator[None]:
    """Nothing inside reaches another machine, whatever a run's rows and models have the libraries that read them ask for, such as pictures by URL."""
    if is_on:
        _watch_sockets()
        _inside.append(None)
    try:
        yield
    finally:
        if is_on:
            _inside.pop()


@functools.cache
def _watch_sockets() -> None:
    """Python reports each such call before it is made, to hooks that stay for the process."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        # Unix sockets stay, over which processes of this machine talk.
        if _inside and event in _REACHING and getattr(arguments[0], "family", None) != socket.AF_UNIX:
            raise OSError(errno.ENETUNREACH, "files of a run may not name other machines")

    sys.addaudithook(refuse)
