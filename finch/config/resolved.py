"""The resolved config saved next to a run; configs and values without secrets, for files, logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

if TYPE_CHECKING:
    from finch.config.schema import Keys

# Keys whose values are never shown. pad_token and the like are words of a tokenizer, not secrets.
SECRETS = re.compile(
    r"^(?!(pad|bos|eos|unk|sep|cls|mask)_token$)(.*[_-])?"
    r"(token|api[_-]?key|access[_-]?(key|token)|auth|authorization|secret|(secret|private)[_-]?key|passw(or)?d|pwd|credentials?|webhook[_-]?url)$",
    re.IGNORECASE,
)
_MIN_SECRET_LENGTH = 8  # a shorter secret may be part of another value by chance


def redacted(cfg: DictConfig) -> DictConfig:
    """A resolved copy with tokens, API keys and passwords replaced by ``***``; for everything that is written or logged."""
    secrets: set[str] = set()

    def mask_keys(value: Any, key: str) -> Any:
        if not (isinstance(value, str) and value and SECRETS.match(key)):
            return value
        if len(value) >= _MIN_SECRET_LENGTH:
            secrets.add(value)
        return "***"

    def mask_values(value: Any, _: str) -> Any:
        """By interpolation a secret may be part of another value."""
        for secret in secrets if isinstance(value, str) else ():
            value = value.replace(secret, "***")
        return value

    masked = map_values(OmegaConf.to_container(cfg, resolve=True), mask_keys)
    return OmegaConf.create(map_values(masked, mask_values))


def resolved_config(cfg: DictConfig, model: type[Keys]) -> DictConfig:
    """The resolved config to save next to a run: with another ``output_dir`` it starts the same run from scratch there."""
    output = str(cfg.output_dir)

    def relative(value: Any, _: str) -> Any:
        is_inside = isinstance(value, str) and (value == output or value.startswith(output + "/"))
        return "${output_dir}" + value[len(output) :] if is_inside else value

    known = OmegaConf.to_container(
        OmegaConf.masked_copy(redacted(cfg), [field.alias or name for name, field in model.model_fields.items()])
    )
    return OmegaConf.create(
        {**map_values(known, relative), "output_dir": output, "resume_from_checkpoint": False, "overwrite": False}
    )


def map_values(node: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """A container with ``change(value, key)`` in place of each value; those of a list have the key ""."""
    if isinstance(node, dict):
        return {name: map_values(value, change, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [map_values(value, change) for value in node]
    return change(node, key)


def format_value(value: Any, key: str = "") -> str:
    """A value on one line of at most 60 characters, ``***`` if the key is a secret's."""
    if isinstance(value, (DictConfig, ListConfig)):
        return "{...}" if isinstance(value, DictConfig) else "[...]"  # a block may hold secrets, and is long
    text = "***" if SECRETS.match(key) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
