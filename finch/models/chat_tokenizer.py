"""A torchtune tokenizer on a Hugging Face folder: its tokenizer.json, its special tokens, its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torchtune.data import Message
from torchtune.modules.transforms import Transform
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from finch.errors import UserError


class ChatTokenizer(ModelTokenizer, Transform):
    """Renders conversations with the folder's own chat template and marks what the model has to write itself.

    Targets are an assistant turn's content and its closing token. The turn's header, with thinking off also the empty
    thinking block that a hybrid model's template puts there, is what generation starts from and is masked. A
    conversation with an unmasked user turn (torchtune's ``train_on_input``) is trained on as a whole.

    Args:
        tokenizer_json: the folder's tokenizer.json.
        chat_template: Jinja source; rendered in a sandbox, as transformers does.
        end_of_turn: the token that closes a turn.
        pad_token: the token that pads.
        max_seq_len: tokens after which a conversation is cut off; None: never.
        thinking: the template's ``enable_thinking``.

    Raises:
        UserError: a file that is missing or broken, or a special token that the tokenizer does not have.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        chat_template: str,
        *,
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
        self.eos_id, self.pad_id = self._special(end_of_turn), self._special(pad_token)
        self.stop_tokens = [self.eos_id]
        self.max_seq_len = max_seq_len
        self.prompt_template = None
        self._end_of_turn, self._thinking = end_of_turn, thinking
        self._template = _environment().from_string(chat_template)

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
        """
        turns = [{"role": message.role, "content": message.text_content} for message in messages]
        text = self._render(turns, generation=not add_end_tokens)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if any(not message.masked and message.role != "assistant" for message in messages):
            mask = [False] * len(encoding.ids)
        else:
            spans = [
                self._written(turns, place, text)
                for place, message in enumerate(messages)
                if message.role == "assistant" and not message.masked
            ]
            mask = [not any(start <= begin and end <= stop for start, stop in spans) for begin, end in encoding.offsets]
        return encoding.ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> Mapping[str, Any]:
        sample = dict(sample)
        tokens, mask = self.tokenize_messages(sample.pop("messages"), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}

    def _written(self, turns: list[dict[str, str]], place: int, text: str) -> tuple[int, int]:
        """Where the assistant's turn at ``place`` stands in ``text``, from after its header to its closing token."""
        # An earlier turn of a hybrid model has no thinking block, whatever the switch says; then the bare header counts.
        headers = [
            self._render(turns[:place], generation=True, thinking=thinking) for thinking in (self._thinking, True)
        ]
        start = next((len(header) for header in headers if text.startswith(header)), None)
        close = -1 if start is None else text.find(self._end_of_turn, start)
        if start is None or close < 0:
            raise UserError(
                f"tokenizer: the chat template of {self._path.parent} does not render an assistant turn as a header, the content and "
                f"{self._end_of_turn}; finch cannot tell what to train on"
            )
        return start, close + len(self._end_of_turn)

    def _render(self, turns: list[dict[str, str]], *, generation: bool, thinking: bool | None = None) -> str:
        thinking = self._thinking if thinking is None else thinking
        try:
            return self._template.render(messages=turns, add_generation_prompt=generation, enable_thinking=thinking)
        except TemplateError as error:
            raise UserError(
                f"tokenizer: the chat template of {self._path.parent} refuses a conversation ({error})"
            ) from error

    def _special(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise UserError(
                f"tokenizer: {self._path} lacks the special token {token}, which the chat template needs; give the tokenizer of this model"
            )
        return number


def read_chat_template(folder: Path) -> str | None:
    """A folder's chat template: chat_template.jinja, or the field of tokenizer_config.json; None without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written for."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    return environment
