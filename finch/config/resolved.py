"""The resolved config saved next to a run; configs and values without secrets, for files, logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from finch.config.schema import Keys

# Keys whose values are never shown. pad_token and the like are words of a tokenizer, not secrets.
_SECRETS = re.compile(
    r"(?!(pad|bos|eos|unk|sep|cls|mask)_token$)(.*[_-])?(token|jwt|bearer|cookie|dsn|auth|authorization|secret|passphrase|passw(or)?d|pwd|"
    r"credentials?|(api|access|account|secret|private|signing|encryption)[_-]?key|connection[_-]?string|webhook[_-]?url)",
    re.IGNORECASE,
)
_WORDS = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # of apiToken
_MIN_SECRET_LENGTH = 8  # a shorter secret may be part of another value by chance


def is_secret(key: str) -> bool:
    """Whether a key's values are never shown."""
    return _SECRETS.fullmatch(_WORDS.sub("_", key)) is not None


def redacted(cfg: DictConfig) -> dict[str, Any]:
    """A resolved copy with tokens, API keys and passwords replaced by ``***``, also those in URLs; for everything that is written or logged."""
    secrets: set[str] = set()

    def mask_keys(value: Any, key: str) -> Any:
        # A switch such as use_auth_token: True holds no secret.
        if value in (None, "", True, False) or not is_secret(key):
            return value
        if len(str(value)) >= _MIN_SECRET_LENGTH:
            secrets.add(str(value))
        return "***"

    def mask_values(value: Any, _: str) -> Any:
        """Masks secrets that are part of another value, by interpolation."""
        for secret in secrets if isinstance(value, str) else ():
            value = value.replace(secret, "***")
        return _without_login(value) if isinstance(value, str) else value

    # Two passes: all secrets are known before other values are searched for them.
    masked = map_values(OmegaConf.to_container(cfg, resolve=True), mask_keys)
    return map_values(masked, mask_values)


def _without_login(text: str) -> str:
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def resolved_config(cfg: DictConfig, model: type[Keys]) -> DictConfig:
    """The resolved config to save next to a run: with another ``output_dir`` it starts the same run from scratch there."""
    output = str(cfg.output_dir)

    def relative(value: Any, _: str) -> Any:
        is_inside = isinstance(value, str) and (value == output or value.startswith(output + "/"))
        return "${output_dir}" + value[len(output) :] if is_inside else value

    # Keys of the user's own are left out: the values that referred to them are resolved.
    names = {field.alias or name for name, field in model.model_fields.items()}
    known = {name: map_values(value, relative, name) for name, value in redacted(cfg).items() if name in names}
    return OmegaConf.create({**known, "output_dir": output, "resume_from_checkpoint": False, "overwrite": False})


def map_values(node: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """A container with ``change(value, key)`` in place of each value; those of a list have the list's. All names are texts: YAML's ``1:`` is a
    number."""
    if isinstance(node, dict):
        return {str(name): map_values(value, change, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [map_values(value, change, key) for value in node]
    return change(node, key)


def format_value(value: Any, key: str = "") -> str:
    """A value on one line of at most 60 characters, ``***`` if the key is a secret's."""
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        return "{...}" if isinstance(value, Mapping) else "[...]"  # a block may hold secrets, and is long
    text = "***" if is_secret(key) else _without_login(" ".join(str(value).split()))
    return text if len(text) <= 60 else text[:57] + "..."


def format_override(override: str) -> str:
    """``key=value`` as messages show it."""
    key, sign, value = override.partition("=")
    value = re.sub(
        r"([\w-]+)(: *)[^,}\]]+", lambda match: f"{match[1]}{match[2]}***" if is_secret(match[1]) else match[0], value
    )
    return f"{key}{sign}{format_value(value, key.rpartition('.')[2])}"
