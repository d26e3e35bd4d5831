"""The resolved config that is kept beside a run, and values as logs and error messages may show them: without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from finch.config.schema import Option

# Keys whose values are never shown. pad_token and the like are words of a tokenizer, not secrets.
SECRETS = re.compile(
    r"^(?!(pad|bos|eos|unk|sep|cls|mask)_token$)(.*_)?(token|api_?key|access_key|auth|secret|secret_key|password)$",
    re.IGNORECASE,
)
_SWEPT_LENGTH = 8  # shorter values may stand inside other words by chance


def redacted(cfg: DictConfig) -> DictConfig:
    """A copy, resolved, in which tokens, keys and passwords are starred; for everything that is written or logged."""

    secrets: set[str] = set()

    def star(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {name: star(value, str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [star(value) for value in node]
        if isinstance(node, str) and node and SECRETS.match(key):
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


def resolved_config(cfg: DictConfig, options: Mapping[str, Option]) -> DictConfig:
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


def shown(value: Any, key: str = "") -> str:
    if isinstance(value, (DictConfig, ListConfig)):
        return "{...}" if isinstance(value, DictConfig) else "[...]"  # a block may hold secrets, and is long
    text = "***" if SECRETS.match(key) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
