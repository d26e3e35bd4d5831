"""The resolved config saved next to a run; configs and values without secrets, for files, logs and error messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

if TYPE_CHECKING:
    from finch.config.schema import Keys

# Keys whose values are never shown. pad_token and the like are words of a tokenizer, not secrets.
SECRETS = re.compile(
    r"^(?!(pad|bos|eos|unk|sep|cls|mask)_token$)(.*_)?(token|api_?key|access_key|auth|secret|secret_key|password)$",
    re.IGNORECASE,
)
_MIN_SECRET_LENGTH = 8  # a shorter secret may be part of another value by chance


def redacted(cfg: DictConfig) -> DictConfig:
    """A resolved copy with tokens, API keys and passwords replaced by ``***``; for everything that is written or logged."""
    secrets: set[str] = set()

    def mask_keys(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {name: mask_keys(value, str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [mask_keys(value) for value in node]
        if isinstance(node, str) and node and SECRETS.match(key):
            if len(node) >= _MIN_SECRET_LENGTH:
                secrets.add(node)
            return "***"
        return node

    def mask_values(node: Any) -> Any:
        """By interpolation a secret may be part of another value."""
        if isinstance(node, dict):
            return {name: mask_values(value) for name, value in node.items()}
        if isinstance(node, list):
            return [mask_values(value) for value in node]
        for secret in secrets if isinstance(node, str) else ():
            node = node.replace(secret, "***")
        return node

    return OmegaConf.create(mask_values(mask_keys(OmegaConf.to_container(cfg, resolve=True))))


def resolved_config(cfg: DictConfig, model: type[Keys]) -> DictConfig:
    """The resolved config to save next to a run: with another ``output_dir`` it starts the same run from scratch there."""
    output = str(cfg.output_dir)

    def relative(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: relative(value) for name, value in node.items()}
        if isinstance(node, list):
            return [relative(value) for value in node]
        if isinstance(node, str) and (node == output or node.startswith(output + "/")):
            return "${output_dir}" + node[len(output) :]
        return node

    known = OmegaConf.to_container(
        OmegaConf.masked_copy(redacted(cfg), [field.alias or name for name, field in model.model_fields.items()])
    )
    return OmegaConf.create(
        {**relative(known), "output_dir": output, "resume_from_checkpoint": False, "overwrite": False}
    )


def format_value(value: Any, key: str = "") -> str:
    """A value on one line of at most 60 characters, ``***`` if the key is a secret's."""
    if isinstance(value, (DictConfig, ListConfig)):
        return "{...}" if isinstance(value, DictConfig) else "[...]"  # a block may hold secrets, and is long
    text = "***" if SECRETS.match(key) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
