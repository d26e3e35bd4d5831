"""A torchtune tokenizer on a Hugging Face folder: its tokenizer.json, its special tokens, its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtune.data import Message
from torchtune.modules.transforms import Transform
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from finch.errors import UserError
from finch.models.answer_spans import AnswerSpans
from finch.models.chat_template import ChatTemplate

TOKENIZER = "tokenizer.json"
PROMPT_STYLES = ("chat", "authors")


class ChatTokenizer(ModelTokenizer, Transform):
    """Renders conversations with the folder's own chat template and masks what the model does not have to write itself.

    Targets are an assistant turn's content and its closing token. The turn's header, with thinking off also the empty
    thinking block that a hybrid model's template puts there, is what generation starts from and is masked. A
    conversation with an unmasked user turn (torchtune's ``train_on_input``) is trained on completely.

    Args:
        tokenizer: the folder's, see :func:`load_tokenizer`.
        template: the folder's.
        eos_token: ends a plain text.
        pad_token: pads. It may be a token with a meaning: targets are known by their place, not by their token.
        bos_token: begins a plain text; None: the model was not trained with one.
        max_seq_len: tokens after which a conversation is truncated; None: never.
        prompt_style: ``chat``, or ``authors`` as in the FINCH paper's code: a conversation without a system turn gets an empty
            one, instead of the template's default.

    Raises:
        UserError: another prompt_style; the tokenizer lacks a special token; the template leaves an assistant turn out or does not close it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_token: str,
        pad_token: str,
        bos_token: str | None = None,
        max_seq_len: int | None = None,
        prompt_style: str = "chat",
    ) -> None:
        if prompt_style not in PROMPT_STYLES:
            raise UserError(f"tokenizer.prompt_style={prompt_style} must be {' or '.join(PROMPT_STYLES)}")
        self._tokenizer, self._template, self._prompt_style = tokenizer, template, prompt_style
        self.special_tokens = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self.bos_id = None if bos_token is None else self.special_id(bos_token)
        self.eos_id, self.pad_id = self.special_id(eos_token), self.special_id(pad_token)
        self._answer_spans = AnswerSpans(template, self.special_tokens)
        self.stop_tokens = sorted({self.eos_id, self.special_id(self._answer_spans.closing_token)})
        self.max_seq_len = max_seq_len
        self.prompt_template = None
        self._added_ids = frozenset(self.special_tokens.values())

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def special_id(self, token: str) -> int:
        """
        Raises:
            UserError: the tokenizer lacks it.
        """
        number = self.special_tokens.get(token, self._tokenizer.token_to_id(token))
        if number is None:
            raise UserError(
                f"tokenizer: {self._template.folder / TOKENIZER} lacks the special token {token}, which the chat template needs; give the tokenizer of this model"
            )
        return number

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of plain text; ``add_bos`` is ignored where the model was not trained with such a token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return [*bos, *ids, *([self.eos_id] if add_eos else [])]

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
        if self._prompt_style == "authors" and turns[:1] and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        text = self._template.render(turns, generation=not add_end_tokens)
        for turn in turns:
            if turn["content"].strip() not in text:
                raise UserError(
                    f"tokenizer: the chat template of {self._template.folder} leaves out the text of a {turn['role']} turn; finch would train "
                    "on a conversation without it: give rows, or a template, without such turns"
                )
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        if any(not message.masked and message.role != "assistant" for message in messages):
            mask = [False] * len(ids)
        else:
            mask = [True] * len(ids)
            answers = [message for message in messages if message.role == "assistant"]
            spans = self._answer_spans.find(text, turns, generation=not add_end_tokens)
            for answer, (start, stop) in zip(answers, spans, strict=True):
                if answer.masked:
                    continue
                for index, (begin, end) in enumerate(offsets):
                    if start <= begin < stop:  # Phi-3's closing token ends later: it takes a newline along
                        mask[index] = False
                    elif begin < start < end and text[start:end].strip() and ids[index] not in self._added_ids:
                        mask[index] = False  # a token of the answer that takes the space before it along
        return ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> Mapping[str, Any]:
        sample = dict(sample)
        tokens, mask = self.tokenize_messages(sample.pop("messages"), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}


def load_tokenizer(file: Path) -> Tokenizer:
    """
    Raises:
        UserError: tokenizer.json is missing or broken.
    """
    if not file.is_file():
        raise UserError(f"tokenizer: {file} does not exist; download it or correct the path")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exceptions
        raise UserError(f"tokenizer: {file} cannot be read ({error}); download it again") from error
