"""A folder's chat template: from messages to the text that the model reads, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finch.errors import UserError
from finch.models.hf_config import read_settings

Turn = Mapping[str, str]
"""``role`` and ``content``."""


class ChatTemplate:
    """A chat template with what it is rendered with beside the messages.

    Args:
        source: Jinja source; rendered in a sandbox, as transformers does.
        folder: where it comes from, for messages.
        special_tokens: by transformers' names, such as ``bos_token``; templates write some of them.
        thinking: the template's ``enable_thinking``.

    Raises:
        UserError: the source is no template.
    """

    def __init__(self, source: str, folder: Path, special_tokens: Mapping[str, str], *, thinking: bool = False) -> None:
        self.source, self.folder, self.thinking = source, folder, thinking
        self._variables = {"tools": None, "documents": None, **special_tokens, "enable_thinking": thinking}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UserError(f"tokenizer: the chat template of {folder} cannot be read ({error}); fix it") from error

    def render(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        """The text of a conversation.

        Args:
            turns: in order.
            generation: whether to end in the header of the next assistant turn.

        Raises:
            UserError: the template refuses the conversation.
        """
        try:
            return self._template.render(**self._variables, messages=turns, add_generation_prompt=generation)
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:  # what Jinja lets through
            raise UserError(
                f"tokenizer: the chat template of {self.folder} refuses a conversation ({error})"
            ) from error


def read_chat_template(folder: Path) -> str | None:
    """A folder's chat template: chat_template.jinja, or the field of tokenizer_config.json; None without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = read_settings(config).get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        if template is None:
            raise UserError(f"tokenizer: {config} has chat templates, but none named default; name one so")
    return template


class _Generation(Extension):
    """The block that marks assistant turns in training templates; its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written for: transformers'."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
