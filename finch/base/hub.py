"""Models and rows by their names on the Hugging Face hub, as paths of this machine: in the hub's cache, where a snapshot's folder is named by its commit.

A name is looked up only where the user gives it, in an argument or a config of a command; never one that the files of a run have.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from finch.base.errors import Unavailable, UserError
from finch.base.files import exists
from finch.base.log import logger

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?(?<!\.json)(?<!\.model)")
_ROWS = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/\w+/[^/]+|[^/]+))?/([^/].*)")
_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?![^/])")
_MODEL_KEYS = ("model_dir", "model.path", "tokenizer.path", "checkpointer.checkpoint_dir", "--base", "--tuned")
# Many repositories have the same weights in other formats too.
_SMALL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "*.jinja", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)
_FILES = (*_SMALL_FILES, "model*.safetensors", "adapter_*")


def local_path(key: str, value: Any, left_out: Collection[str] = (), *, is_first_look: bool = False) -> Any:
    """The value of a config's key or a command's option; in place of a name on the hub, the folder or file of this machine.

    A folder here that has such a name comes first. Blocks and lists are searched, but for the keys ``left_out``. A first look leaves the weights
    where they are.

    Raises UserError for a name that the hub does not have, or not for everyone; Unavailable where the hub, the network or the disk fails.
    """
    look = functools.partial(local_path, left_out=left_out, is_first_look=is_first_look)
    if isinstance(value, dict):
        return {name: look(f"{key}.{name}".lstrip("."), part) for name, part in value.items()}
    if isinstance(value, list):
        return [look(key, part) for part in value]
    if not isinstance(value, str) or key in left_out or exists(value):
        return value
    if key in _MODEL_KEYS and (match := _NAME.fullmatch(value)):
        return _find(f"{key}={value}", match[1], match[2], "model", _SMALL_FILES if is_first_look else _FILES)
    if key.rpartition(".")[2] == "data_files" and (match := _ROWS.fullmatch(value)):
        return f"{_find(f'{key}={value}', match[1], match[2], 'dataset', (match[3],))}/{match[3]}"
    return value


def local_paths(blocks: Any, overrides: Sequence[str], *, is_first_look: bool = False) -> tuple[Any, list[str]]:
    """A config file's keys and the command line's ``key=value``, which come before them, as :func:`local_path` has them."""
    import yaml

    changed = []
    for override in overrides:
        key, _, text = override.partition("=")
        value = yaml.safe_load(text) if text.startswith("[") and "hf://" in text else text
        path = local_path(key, value, is_first_look=is_first_look)
        changed.append(override if path == value else f"{key}={json.dumps(path, ensure_ascii=False)}")
    return local_path("", blocks, [each.partition("=")[0] for each in overrides], is_first_look=is_first_look), changed


def pinned(key: str, source: Any) -> Any:
    """The name of a data set on the hub with its commit, ``OWNER/NAME@COMMIT``, as far as the hub may be asked; another source as it is. Raises as
    :func:`local_path`."""
    if not isinstance(source, str) or exists(source) or not (match := _NAME.fullmatch(source)):
        return source
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return source  # of which the datasets library takes what its own cache has
    return f"{match[1]}@{_find(f'{key}={source}', match[1], match[2], 'dataset')}"


def origin(path: str | Path) -> str | None:
    """``OWNER/NAME@COMMIT`` of a path in the hub's cache; None for any other."""
    match = _SNAPSHOT.search(str(path))
    return match and f"{match[1]}/{match[2]}@{match[3]}"


def name_of(folder: Path) -> str:
    """What a folder is called: its own name, or its model's on the hub."""
    match = _SNAPSHOT.search(str(folder))
    return match[2] if match else folder.resolve().name


@functools.cache
def _find(label: str, repo: str, revision: str | None, kind: str, files: tuple[str, ...] = ()) -> str:
    """The folder of a snapshot that has all files of these patterns; without patterns, the commit. ``label`` begins the line of an error.

    Of ranks that start at once one downloads a file, and the others wait for it, by the locks of the hub's library: a process's end opens its own.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    # Its bases are what HTTP and the network raise, by the library's version httpx's or requests', and OSError.
    failures: tuple[type[Exception], ...] = (*errors.HfHubHTTPError.__bases__, RuntimeError, UserWarning)
    incomplete = getattr(errors, "IncompleteSnapshotError", ())
    options: Any = {"repo_type": kind, "revision": revision}
    try:
        with warnings.catch_warnings():
            # As an error; else the disk would be filled first.
            warnings.filterwarnings("error", "Not enough free disk space")
            try:
                # Asked here as well, since the library's own question has no time limit where a firewall drops it.
                commit = HfApi().repo_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT, **options).sha
            except failures as error:
                if not files:
                    raise
                try:
                    folder = snapshot_download(repo, allow_patterns=list(files), local_files_only=True, **options)
                except errors.LocalEntryNotFoundError as missing:
                    raise missing if isinstance(missing, incomplete) else error from None
                logger.info(f"{label} is the cache's {origin(folder)} ({_reason(error)})")
                return folder
            return snapshot_download(repo, allow_patterns=list(files), **options) if files else str(commit)
    except failures as error:
        cache, hub, result = constants.HF_HUB_CACHE, constants.ENDPOINT, UserError
        if isinstance(error, errors.GatedRepoError):
            text = f"{repo} is gated: accept its terms at {hub}/{'datasets/' if kind == 'dataset' else ''}{repo}, and set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            text = f"{repo} has no revision {revision} at {hub}; correct what follows @"
        elif (status := getattr(getattr(error, "response", None), "status_code", None)) in (401, 403, 404):
            text = f"{hub} has no {kind} of that name for this login ({status}); correct it, or set HF_TOKEN"
        elif isinstance(error, incomplete):
            text = f"the cache has only a part of {repo}, and {hub} cannot be reached; start again where it can"
        elif constants.HF_HUB_OFFLINE:
            text = f"{cache} has no copy of {repo}, and HF_HUB_OFFLINE=1 keeps the hub from being asked; unset it, or correct the name"
        elif getattr(error, "errno", None) or isinstance(error, UserWarning):
            text, result = f"{cache} cannot be written ({_reason(error)}); make room, or set HF_HOME", Unavailable
        else:
            result = Unavailable
            text = f"{hub} fails ({_reason(error)}); start again where it answers, or with HF_HUB_OFFLINE=1 for a copy in the cache"
        raise result(f"{label}{' is no folder here, and' if kind == 'model' else ':'} {text}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
