"""A torchtune tokenizer on a Hugging Face folder: its tokenizer.json, its special tokens, its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torchtune.data import Message
from torchtune.modules.transforms import Transform
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from finch.errors import UserError

THINKING = ("<think>", "</think>")
EMPTY_THINKING = "<think>\n\n</think>\n\n"


class ChatTokenizer(ModelTokenizer, Transform):
    """Renders conversations with the folder's own chat template and masks what the model does not have to write itself.

    Targets are an assistant turn's content and its closing token. The turn's header, with thinking off also the empty
    thinking block that a hybrid model's template puts there, is what generation starts from and is masked. A
    conversation with an unmasked user turn (torchtune's ``train_on_input``) is trained on completely.

    Args:
        tokenizer_json: the folder's tokenizer.json.
        chat_template: Jinja source; rendered in a sandbox, as transformers does.
        assistant_header: the text that begins an assistant turn and ends a generation prompt.
        turn_start: the token that begins a turn.
        end_of_turn: the token that closes a turn.
        pad_token: the token that pads.
        max_seq_len: tokens after which a conversation is truncated; None: never.
        thinking: the template's ``enable_thinking``.

    Raises:
        UserError: a file is missing or broken, or the tokenizer lacks a special token.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        chat_template: str,
        *,
        assistant_header: str,
        turn_start: str,
        end_of_turn: str,
        pad_token: str,
        max_seq_len: int | None = None,
        thinking: bool = False,
    ) -> None:
        if not tokenizer_json.is_file():
            raise UserError(f"tokenizer: {tokenizer_json} does not exist; download it or correct the path")
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        except Exception as error:  # the Rust side raises plain Exceptions
            raise UserError(f"tokenizer: {tokenizer_json} cannot be read ({error}); download it again") from error
        self._path = tokenizer_json
        self.special_tokens = {
            token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        for token in (turn_start, *(token for token in THINKING if token in chat_template)):
            self._special(token)
        self.eos_id, self.pad_id = self._special(end_of_turn), self._special(pad_token)
        self.stop_tokens = [self.eos_id]
        self.max_seq_len = max_seq_len
        self.prompt_template = None
        self._assistant_header, self._turn_start, self._end_of_turn = assistant_header, turn_start, end_of_turn
        self._thinking = thinking
        try:
            self._template = _environment().from_string(chat_template)
        except TemplateError as error:
            raise UserError(
                f"tokenizer: the chat template of {tokenizer_json.parent} cannot be read ({error}); fix it"
            ) from error

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of plain text; ``add_bos`` is ignored where the family has no such token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def tokenize_messages(
        self, messages: list[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Token ids and mask (True: no target) of a conversation.

        Args:
            messages: torchtune's, text only.
            add_end_tokens: False ends in the header of the next assistant turn, for generation.

        Raises:
            UserError: the template refuses the conversation, or leaves a turn out.
        """
        # torchtune calls a tool's answer "ipython", chat templates "tool".
        turns = [
            {"role": "tool" if message.role == "ipython" else message.role, "content": message.text_content}
            for message in messages
        ]
        text = self._render(turns, generation=not add_end_tokens)
        for turn in turns:
            if turn["content"].strip() not in text:
                raise UserError(
                    f"tokenizer: the chat template of {self._path.parent} leaves out the text of a {turn['role']} turn; finch would train "
                    "on a conversation without it: give rows, or a template, without such turns"
                )
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if any(not message.masked and message.role != "assistant" for message in messages):
            mask = [False] * len(encoding.ids)
        else:
            answers = [message for message in messages if message.role == "assistant"]
            written = self._written(text, len(answers), add_end_tokens)
            spans = [span for message, span in zip(answers, written, strict=True) if not message.masked]
            mask = [not any(start <= begin and end <= stop for start, stop in spans) for begin, end in encoding.offsets]
        return encoding.ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> Mapping[str, Any]:
        sample = dict(sample)
        tokens, mask = self.tokenize_messages(sample.pop("messages"), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}

    def _written(self, text: str, number: int, ended: bool) -> list[tuple[int, int]]:
        """Start and end of each assistant turn in ``text``, in characters: from after its header to its last closing token."""
        starts = [header.end() for header in re.finditer(re.escape(self._assistant_header), text)]
        if len(starts) != number + (0 if ended else 1):
            raise UserError(
                f"tokenizer: the chat template of {self._path.parent} does not begin each assistant turn, and nothing else, with "
                f"{self._assistant_header!r}; finch cannot tell what to train on"
            )
        spans = []
        for start, following in zip(starts[:number], [*starts[1:], None], strict=False):
            limit = len(text) if following is None else following - len(self._assistant_header)
            stop = text.find(self._turn_start, start, limit)  # a user's turn may follow first
            close = text.rfind(self._end_of_turn, start, limit if stop < 0 else stop)
            # An empty thinking block is part of the generation prompt where thinking is off.
            empty = not self._thinking and text.startswith(EMPTY_THINKING, start)
            spans.append((start + (len(EMPTY_THINKING) if empty else 0), close + len(self._end_of_turn)))
        return spans

    def _render(self, turns: list[dict[str, str]], *, generation: bool) -> str:
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=generation, enable_thinking=self._thinking
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:  # what Jinja lets through
            raise UserError(
                f"tokenizer: the chat template of {self._path.parent} refuses a conversation ({error})"
            ) from error

    def _special(self, token: str) -> int:
        if token not in self.special_tokens:
            raise UserError(
                f"tokenizer: {self._path} lacks the special token {token}, which the chat template needs; give the tokenizer of this model"
            )
        return self.special_tokens[token]


def read_chat_template(folder: Path) -> str | None:
    """A folder's chat template: chat_template.jinja, or the field of tokenizer_config.json; None without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
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
