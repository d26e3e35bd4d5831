"""torchtune tokenizers on a Hugging Face folder: its tokenizer.json, its special tokens, its chat template. ``auto_tokenizer`` for any folder."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer
from torchtune.data import Message
from torchtune.modules.transforms import Transform
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from finch.base.errors import UserError
from finch.base.log import logger
from finch.models.chat_template import (
    CHAT_TEMPLATE,
    THINKING,
    THINKING_FIELDS,
    AnswerSpans,
    ChatTemplate,
    Tools,
    Turn,
    common_prefix,
    read_chat_template,
    visible,
)
from finch.models.hf_config import CONFIG, check_folder, read_settings

TOKENIZER = "tokenizer.json"
PROMPT_STYLES = ("chat", "authors")
Spans = list[tuple[int, int]]
"""Starts and ends in a text, in characters."""


class ChatTokenizer(ModelTokenizer, Transform):
    """Renders conversations with the folder's own chat template and masks what the model does not have to write itself.

    Targets are an assistant turn's content and its closing token. The turn's header, with thinking off also the empty
    thinking block that a hybrid model's template puts there, is what generation starts from and is masked. A
    conversation with an unmasked user turn (torchtune's ``train_on_input``) is trained on completely.

    Args:
        eos_token: ends a plain text.
        pad_token: pads. It may be a token with a meaning: targets are known by their place, not by their token.
        bos_token: begins a plain text; None: the model was not trained with one.
        max_seq_len: tokens after which a conversation is truncated; None: never.

    Attributes:
        date: the day that the template writes as today's, as YYYY-MM-DD; None: it writes none.
        prompt_problem: of :class:`finch.models.chat_template.AnswerSpans`.
        chat_template: Jinja source with which transformers renders conversations as this tokenizer does, ``enable_thinking`` left out.

    Raises UserError for a special token that the tokenizer lacks, and a template that leaves an assistant turn out or does not close it.
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
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.chat_template = with_default_thinking(template.source, template.thinking)
        self.special_tokens = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self.bos_id = None if bos_token is None else self.special_id(bos_token)
        self.eos_id, self.pad_id = self.special_id(eos_token), self.special_id(pad_token)
        self._answer_spans = AnswerSpans(template, self.special_tokens)
        self.prompt_problem = self._answer_spans.prompt_problem
        if self.prompt_problem is not None:
            logger.warning(f"tokenizer: {self.prompt_problem}")
        self.stop_tokens = sorted({self.eos_id, *map(self.special_id, self._answer_spans.closing_tokens)})
        self._known_fields: dict[str, bool] = {}
        self.max_seq_len = max_seq_len
        self.prompt_template = None
        self._added_ids = frozenset(self.special_tokens.values())

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def special_id(self, token: str) -> int:
        """The id of a special token. Raises UserError if the tokenizer lacks it."""
        number = self.special_tokens.get(token, self._tokenizer.token_to_id(token))
        if number is None:
            raise UserError(
                f"tokenizer: {self._template.folder / TOKENIZER} lacks the special token {token}, which the chat template needs; give the tokenizer of this model"
            )
        return number

    @property
    def date(self) -> str | None:
        return str(self._template.today) if self.reads("strftime_now") else None

    @date.setter
    def date(self, day: str) -> None:
        self._template.today = day_of(day)

    @property
    def fingerprint(self) -> list[Any]:
        """All that a conversation's tokens depend on."""
        return [self._content, *self._template.fingerprint, self.bos_id, self.eos_id, self.max_seq_len]

    @functools.cached_property
    def _content(self) -> str:
        return self._tokenizer.to_str()  # megabytes, a tenth of a second

    def reads(self, field: str) -> bool:
        """Whether the chat template reads a field of a turn, or ``tools``: it names it, and a text in the field changes what it writes."""
        if field not in self._known_fields:
            self._known_fields[field] = self._probe(field)
        return self._known_fields[field]

    def _probe(self, field: str) -> bool:
        names = ("reasoning_content", "thinking") if field in THINKING_FIELDS else (field,)
        is_named = any(re.search(rf"\b{re.escape(name)}\b", self._template.source) for name in names)
        for turns in _PROBES if is_named and field not in _NO_TEXTS else ():
            with contextlib.suppress(UserError):  # where the template takes no calls
                filled = [{**turn, **dict.fromkeys(names, "a")} for turn in turns]
                return self._template.render(turns) != self._template.render(filled)
        return is_named

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of plain text; ``add_bos`` is ignored where the model was not trained with such a token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return [*bos, *ids, *([self.eos_id] if add_eos else [])]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` of each text between BOS and EOS, on all cores."""
        bos = [] if self.bos_id is None else [self.bos_id]
        # The fast one keeps no offsets, which plain text does not need: every token is a target.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*bos, *each.ids, self.eos_id] for each in encodings]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def tokenize_messages(
        self, messages: Sequence[Message], *, tools: Tools = None, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Token ids and mask (True: no target) of a conversation of torchtune's messages, text only.

        Without ``add_end_tokens`` it ends in the header of the next assistant turn, for generation. ``tools``: JSON schemas, for the template.

        Raises:
            UserError: the template refuses the conversation, or leaves out a part of it.
        """
        text, spans = self._render(messages, tools, generation=not add_end_tokens)
        # The template has written BOS where the model wants it; the tokenizer would add a second one.
        return self._masked(self._tokenizer.encode(text, add_special_tokens=False), text, spans)

    def tokenize_many(self, samples: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[bool]] | UserError]:
        """:meth:`tokenize_messages` of each sample's ``messages`` and ``tools``, on all cores; of one that it refuses, the error."""
        rendered: list[tuple[str, Spans] | UserError] = []
        for sample in samples:
            try:
                rendered.append(self._render(sample["messages"], sample.get("tools")))
            except UserError as error:
                rendered.append(error)
        texts = [each[0] for each in rendered if not isinstance(each, UserError)]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return [each if isinstance(each, UserError) else self._masked(next(encodings), *each) for each in rendered]

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation: bool = False) -> tuple[str, Spans]:
        """The text, and where in it targets are, in characters."""
        turns = [turn_of(message, self._writes_text_arguments) for message in messages]
        text = self._template.render(turns, tools, generation=generation)
        if missing := _left_out(text, turns) or self._tool_left_out(turns, tools):
            raise UserError(
                f"tokenizer: its chat template leaves out {missing}; finch would train on a conversation without it: "
                "give rows without it, or a template that writes it"
            )
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        if is_whole := any(not message.masked and message.role != "assistant" for message in messages):
            start = 0
            if messages[0].role == "system" and messages[0].masked:
                # Learned is what stays the same after another system turn, whose own text may be found in a header as well.
                other = self._template.render(
                    [{**turns[0], "content": "\ue000"}, *turns[1:]], tools, generation=generation
                )
                start = len(text) - len(common_prefix(text[::-1], other[::-1]))
            spans = [(start, len(text))] * len(answers)
        else:
            spans = self._answer_spans.find(text, turns, tools, generation=generation)
        learned = {each: span for each, span in zip(answers, spans, strict=True) if not messages[each].masked}
        for each, (first, stop) in {} if generation else learned.items():
            self._check_thinking(turns[each], text[first:stop], is_last=each + 1 == len(turns))
        return text, [(start, len(text))] if is_whole else list(learned.values())

    @functools.cached_property
    def _writes_text_arguments(self) -> bool:
        """Whether the template writes a call's arguments that are JSON text as they are, and not in quotation marks."""
        call = {**_CALL, "function": {"name": "d", "arguments": '{"f": "g"}'}}
        with contextlib.suppress(UserError):  # the template takes no calls, or no text there
            return '{"f": "g"}' in self._template.render([_ASKED, {**_CALLED[0], "tool_calls": [call]}, *_CALLED[1:]])
        return False

    @functools.cached_property
    def headers(self) -> set[tuple[int, ...]]:
        """The last tokens before an answer where generation starts, from the first special one after the end of the turn before: a user's, and a
        tool's. None where the template has no generation prompt, or none with a special token."""
        found = set()
        for *before, last in ([_ASKED], [_ASKED, *_CALLED]):
            turns = [*before, {**last, "content": "\ue000"}]
            with contextlib.suppress(UserError):
                prompt, bare = (self._template.render(turns, generation=each) for each in (True, False))
                ids = self.encode(prompt.rpartition("\ue000")[2])
                end = max((index for index, each in enumerate(ids) if each in self.stop_tokens), default=-1)
                special = [index for index, each in enumerate(ids) if each in self._added_ids and index > end]
                if prompt != bare and special:
                    found.add(tuple(ids[special[0] :]))
        return found

    def _tool_left_out(self, turns: Sequence[Turn], tools: Tools) -> str | None:
        """Which of tools and calls the template leaves out: under names of their own, since another text may have theirs."""
        names: list[str] = []

        def renamed(entry: Mapping[str, Any]) -> Mapping[str, Any]:
            names.append(f"finch{len(names)}x")
            function = {**entry.get("function", entry), "name": names[-1]}
            return {**entry, "function": function} if "function" in entry else function

        called = [
            {**turn, "tool_calls": list(map(renamed, turn["tool_calls"]))} if "tool_calls" in turn else turn
            for turn in turns
        ]
        num_calls, others = len(names), list(map(renamed, tools or ()))
        text = self._template.render(called, others or None) if names else ""
        missing = [number for number, name in enumerate(names) if name not in text]
        return None if not missing else "a tool call" if missing[0] < num_calls else "the tools"

    def _check_thinking(self, turn: Turn, answer: str, *, is_last: bool) -> None:
        """Raises UserError if a turn's thinking is not in the ``answer`` that is learned of it. A field that the template never reads is named as
        unused instead."""
        field = turn.get("reasoning_content", "") if self.reads("reasoning_content") else ""
        if not isinstance(field, str):
            raise UserError(f"the thinking of an answer is {type(field).__name__}, not text")
        before, _, after = turn.get("content", "").rpartition(THINKING[1])[0].rpartition(THINKING[0])
        if not all(text.strip() in answer for text in (field, before, after)):
            which = "the last answer" if is_last else "an answer before the last turn"
            raise UserError(
                f"tokenizer: its chat template leaves out the thinking of {which}, or a text before it, which would be learned without; "
                f"end a row with each such answer, set its weight to 0, remove its thinking, or change {CHAT_TEMPLATE}"
            )

    def _masked(self, encoding: Encoding, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
        """Ids and mask, up to ``max_seq_len``."""
        ids = encoding.ids
        mask = [True] * len(ids)
        for start, stop in spans:
            first, end = _first_token(encoding, start, len(text)), _first_token(encoding, stop, len(text))
            if (before := encoding.char_to_token(start)) is not None and before < first:
                # A token of the answer may take the space before it along; Phi-3's <|assistant|> takes the newline after it along.
                end_of_token = _start_and_end(encoding, before)[1]
                if text[start:end_of_token].strip() and ids[before] not in self._added_ids:
                    first = before
            mask[first:end] = [False] * (end - first)
        return ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> Mapping[str, Any]:
        sample = dict(sample)
        messages, tools = sample.pop("messages"), sample.pop("tools", None)
        tokens, mask = self.tokenize_messages(messages, tools=tools, add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}


_NO_TEXTS = ("tools", "tool_calls", "tool_call_id", "strftime_now")  # an id is no free text: templates look it up
_ASKED: Turn = {"role": "user", "content": "b"}
_ANSWERED: Turn = {"role": "assistant", "content": "c"}
# Mistral's ids have nine letters.
_CALL = {"id": "callnumb1", "type": "function", "function": {"name": "d", "arguments": {}}}
_CALLED = {**_ANSWERED, "tool_calls": [_CALL]}, {"role": "tool", "content": "e", "tool_call_id": "callnumb1"}
_PROBES: tuple[list[Turn], ...] = [_ASKED, *_CALLED, _ANSWERED], [_ASKED, _ANSWERED]


def turn_of(message: Message, writes_text_arguments: bool) -> Turn:
    """A message as transformers gives it to a chat template: without null values, and thinking under the names that templates read."""
    # torchtune calls a tool's answer "ipython", chat templates "tool".
    role = "tool" if message.role == "ipython" else message.role
    fields = {"role": role, "content": message.text_content, **getattr(message, "fields", {})}
    turn = {key: value for key, value in fields.items() if value is not None}
    thinking = next((turn[name] for name in THINKING_FIELDS if name in turn), None)
    if thinking is not None:
        turn = {"thinking": thinking, **turn, "reasoning_content": thinking}
    if "tool_calls" in turn and not writes_text_arguments:
        # OpenAI's rows have JSON in a string there, which the template would write in quotation marks.
        turn["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
    return turn


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        function = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError as error:
        raise UserError(f"the arguments of its call of {function.get('name')} are not JSON ({error})") from error
    return {**call, "function": function} if "function" in call else function


def _left_out(text: str, turns: Sequence[Turn]) -> str | None:
    """The first turn whose content is not in the conversation's ``text``, thinking left aside."""
    for turn in turns:
        content, is_answer = turn.get("content", ""), turn["role"] == "assistant"
        if (visible(content) if is_answer else content.strip()) not in text:
            return f"the text of {'an' if is_answer else 'a'} {turn['role']} turn"
    return None


def _start_and_end(encoding: Encoding, token: int) -> tuple[int, int]:
    """Start and end of a token, in characters."""
    span = encoding.token_to_chars(token)
    assert span is not None
    return span


def _first_token(encoding: Encoding, position: int, length: int) -> int:
    """The first token that begins at a character of the text or later; white space can belong to none."""
    for each in range(position, length):
        if (token := encoding.char_to_token(each)) is not None:
            return token if _start_and_end(encoding, token)[0] >= position else token + 1
    return len(encoding)


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises UserError if the file is missing or broken."""
    if not file.is_file():
        raise UserError(f"tokenizer: {file} does not exist; download it or correct the path")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exceptions
        raise UserError(f"tokenizer: {file} cannot be read ({error}); download it again") from error
    # What an earlier call left in the file, and transformers ignores: rows would be cut or padded by it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_TOKENS_MAP, _TOKENIZER_CONFIG = "special_tokens_map.json", "tokenizer_config.json"

# For a folder without a template.
PLAIN_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- message.role | capitalize ~ ': ' ~ message.content | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"""

# The same in the form of the FINCH paper's authors, whose code separates turns by blank lines.
AUTHORS_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role != 'system' %}{{ message.role | capitalize ~ ': ' }}{% endif %}
{{- message.content | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- if message.content and not loop.last %}{{ '\\n\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"""

_EMPTY_SYSTEM_TURN = """\
{%- if messages and messages[0].role != 'system' %}
{%- set messages = [{'role': 'system', 'content': ''}] + messages %}
{%- endif %}
"""


def styled(source: str, prompt_style: str) -> str:
    """A template in a prompt style: ``authors`` gives conversations without a system turn an empty one, instead of the template's default.
    Raises UserError for another style than ``chat`` and ``authors``."""
    if prompt_style not in PROMPT_STYLES:
        raise UserError(f"tokenizer.prompt_style={prompt_style} must be {' or '.join(PROMPT_STYLES)}")
    # A folder that finch has written in this style begins with the turn already.
    is_done = prompt_style == "chat" or _EMPTY_SYSTEM_TURN in source
    return source if is_done else _EMPTY_SYSTEM_TURN + source


def day_of(date: str | None) -> datetime.date:
    """A day from YYYY-MM-DD; None: today. Raises UserError for another form."""
    try:
        return datetime.date.today() if date is None else datetime.date.fromisoformat(str(date))
    except ValueError as error:
        raise UserError(f"tokenizer.date={date} must be a day such as 2026-01-31") from error


def with_default_thinking(source: str, thinking: bool) -> str:
    """A hybrid model's template that takes ``thinking`` where whoever renders it gives no ``enable_thinking``; another one as it is."""
    if "enable_thinking" not in source:
        return source
    defaults = {
        each: f"{{%- set enable_thinking = enable_thinking | default({each}) %}}\n" for each in ("true", "false")
    }
    for default in defaults.values():
        # The default of an earlier export goes, else a model tuned again would keep both lines.
        source = source.removeprefix(default)
    return defaults[str(thinking).lower()] + source


def auto_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    thinking: bool = False,
    prompt_style: str = "chat",
    date: str | None = None,
) -> ChatTokenizer:
    """The tokenizer of a Hugging Face folder with tokenizer.json, with the folder's chat template.

    A folder without a template gets prompts of the form ``User: ...`` and ``Assistant: ...``, and a log line says so: BOS
    comes first where the tokenizer adds it to a plain text, EOS after each answer. Without a pad token EOS pads; it stays a
    target where it closes an answer.

    Args:
        max_seq_len: tokens after which a conversation is truncated; None: never.
        thinking: the template's ``enable_thinking``; off: answers follow an empty thinking block where the template writes it.
        prompt_style: ``chat``, or ``authors`` for the prompts of the FINCH paper's code: an empty system turn where a conversation
            has none, and blank lines between the turns where the folder has no template.
        date: for a template that writes today's, as YYYY-MM-DD; None: that of the run's first start, which the run keeps.

    Raises UserError for a folder or file that is missing or broken, another prompt_style, no EOS, or a template that does not show what an
    answer is.
    """
    folder = check_folder(path, "tokenizer.path")
    if not (folder / TOKENIZER).is_file() and (folder / "tokenizer.model").is_file():
        raise UserError(
            f"tokenizer.path={path} has tokenizer.model, but no {TOKENIZER}; write it there: python -c "
            f"\"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('.').save_pretrained('.')\""
        )
    tokenizer = load_tokenizer(folder / TOKENIZER)
    settings = _read_tokenizer_settings(folder)
    special = {name: token for name in _SPECIAL_TOKENS if (token := _content(settings.get(name)))}
    if "eos_token" not in special:
        special["eos_token"] = _eos_token(folder, tokenizer)
    bos = _bos_token(tokenizer)
    template = read_chat_template(folder)
    if template is None:
        logger.info(
            f"tokenizer: {folder} has no chat template; prompts are plain text, 'User: ...' and 'Assistant: ...' on separate lines"
        )
        tokens = {"bos_token": bos or "", "eos_token": special["eos_token"]}
        template = "".join(f"{{%- set {name} = {json.dumps(token)} %}}\n" for name, token in tokens.items())
        template += AUTHORS_TEMPLATE if prompt_style == "authors" else PLAIN_TEMPLATE
    return ChatTokenizer(
        tokenizer,
        ChatTemplate(styled(template, prompt_style), folder, special, thinking=thinking, today=day_of(date)),
        bos_token=bos,
        eos_token=special["eos_token"],
        pad_token=special.get("pad_token", special["eos_token"]),
        max_seq_len=max_seq_len,
    )


def _read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The keys of special_tokens_map.json and tokenizer_config.json; the latter counts."""
    settings: dict[str, Any] = {}
    for name in (_SPECIAL_TOKENS_MAP, _TOKENIZER_CONFIG):
        if (folder / name).is_file():
            settings |= read_settings(folder / name)
    return settings


def _content(token: Any) -> str | None:
    """A special token's text; newer files have only the text, older ones also its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _eos_token(folder: Path, tokenizer: Tokenizer) -> str:
    """The EOS token of config.json, for a folder whose tokenizer files do not name one."""
    number = read_settings(folder / CONFIG).get("eos_token_id") if (folder / CONFIG).is_file() else None
    number = number[0] if isinstance(number, list) and number else number
    token = tokenizer.id_to_token(number) if isinstance(number, int) else None
    if token is None:
        raise UserError(f"tokenizer.path={folder} names no eos_token; name it in {_TOKENIZER_CONFIG}")
    return token


def _bos_token(tokenizer: Tokenizer) -> str | None:
    """The token that tokenizer.json puts before a plain text; as in transformers 5, ``add_bos_token`` does not count."""
    plain, complete = (tokenizer.encode("a", add_special_tokens=is_special).tokens for is_special in (False, True))
    return complete[0] if complete[:1] != plain[:1] else None


IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# For a Qwen3 folder without a template: plain ChatML, with Qwen3's empty thinking block where thinking is off.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def qwen3_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: None = None,
    truncation_type: str = "right",
    thinking: bool = False,
    prompt_style: str = "chat",
    date: str | None = None,
) -> ChatTokenizer:
    """The tokenizer of a Qwen3 folder, with that folder's chat template; arguments not listed as for :func:`finch.models.auto_tokenizer`.

    Args:
        path: the folder's tokenizer.json; or its vocab.json, as torchtune's main branch has it: tokenizer.json next to
            it holds the same and the special tokens.
        merges_file: accepted so that such a config works; tokenizer.json has the merges.
        special_tokens_path: a tokenizer.json elsewhere.
        prompt_template: must be None; the folder's chat template decides.
        truncation_type: must be ``right``: what is too long loses its end.

    Raises UserError if a file or special token is missing, or an argument is not supported.
    """
    if prompt_template is not None:
        raise UserError(
            f"tokenizer.prompt_template={prompt_template} is not supported: Qwen3's own chat template decides; remove it"
        )
    if truncation_type != "right":
        raise UserError(f"tokenizer.truncation_type={truncation_type} is not supported: answers come last; use right")
    file = Path(special_tokens_path or path)
    if file.name != TOKENIZER:
        file = file.with_name(TOKENIZER)
    loaded = load_tokenizer(file)
    source = styled(read_chat_template(file.parent) or CHATML, prompt_style)
    special = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    template = ChatTemplate(source, file.parent, special, thinking=thinking, today=day_of(date))
    tokenizer = ChatTokenizer(loaded, template, eos_token=IM_END, pad_token=END_OF_TEXT, max_seq_len=max_seq_len)
    # Asked for now: a tokenizer without them would split them into pieces of text, and nothing would fail.
    for token in (IM_START, *(token for token in THINKING if token in source)):
        tokenizer.special_id(token)
    return tokenizer
