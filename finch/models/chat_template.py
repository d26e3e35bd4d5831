"""A folder's chat template: from messages to the text that the model reads, rendered as transformers renders it.

Also where the answers are in that text: from the end of the generation prompt to the closing token.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from finch.errors import UserError
from finch.models import chat_environment
from finch.models.chat_environment import CPU_SECONDS, RENDER_ERRORS
from finch.models.hf_config import read_settings

CHAT_TEMPLATE = "chat_template.jinja"
THINKING = ("<think>", "</think>")
EMPTY_THINKING = "<think>\n\n</think>\n\n"
Turn = Mapping[str, str]
"""``role`` and ``content``."""


class ChatTemplate:
    """A chat template with the variables it is rendered with.

    Args:
        source: Jinja source; rendered in a sandbox, as transformers does.
        folder: where it comes from, for messages.
        special_tokens: by transformers' names, such as ``bos_token``; templates write some of them.
        thinking: the template's ``enable_thinking``.

    Raises UserError if the source is no template, or does not render a short conversation within 5 s and 2 GB.
    """

    def __init__(self, source: str, folder: Path, special_tokens: Mapping[str, str], *, thinking: bool = False) -> None:
        self.source, self.folder, self.thinking = source, folder, thinking
        self._variables = {"tools": None, "documents": None, **special_tokens, "enable_thinking": thinking}
        try_template(source, self._variables, folder)
        try:
            self._template = chat_environment.environment().from_string(source)
        except RENDER_ERRORS as error:
            raise UserError(f"tokenizer: the chat template of {folder} cannot be read ({error}); fix it") from error

    def render(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        """The text of a conversation; with ``generation`` it ends in the header of the next assistant turn.

        Raises UserError if the template refuses the conversation.
        """
        try:
            return self._template.render(**self._variables, messages=turns, add_generation_prompt=generation)
        except RENDER_ERRORS as error:
            raise UserError(
                f"tokenizer: the chat template of {self.folder} refuses a conversation ({error})"
            ) from error


def read_chat_template(folder: Path) -> str | None:
    """A folder's chat template: chat_template.jinja, or the field of tokenizer_config.json; None without one."""
    file = folder / CHAT_TEMPLATE
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


def try_template(source: str, variables: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError if a template takes too much for a short conversation: somebody else wrote it, so a child process tries it first."""
    if problem := _problem(json.dumps({"source": source, "variables": variables}, default=str)):
        raise UserError(f"tokenizer: the chat template of {folder} does not end well ({problem}); fix or remove it")


@functools.cache
def _problem(job: str) -> str | None:
    command = [sys.executable, "-I", chat_environment.__file__]
    child = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    if child.returncode < 0:
        return f"it was stopped by signal {-child.returncode}, after up to {CPU_SECONDS} s"
    return (child.stderr.strip().splitlines() or ["it failed"])[-1] if child.returncode else None


class AnswerSpans:
    """Finds what the model writes itself: an assistant turn's content and ``closing_token``, one of ``added_tokens``.

    The template is rendered with marks in place of the assistant turns' contents. So nothing needs to be known about its
    family, and a text that looks like a header of a turn is not taken for one.

    Raises UserError if the template leaves an assistant turn out or does not close it.
    """

    def __init__(self, template: ChatTemplate, added_tokens: Iterable[str]) -> None:
        self._template = template
        user, answer = {"role": "user", "content": _mark(0)}, {"role": "assistant", "content": _mark(1)}
        header, end = self._split(template.render([user, answer]), [_mark(0), _mark(1)])[1:]
        tokens = sorted((re.escape(token) for token in added_tokens if token.strip()), key=len, reverse=True)
        closing = re.search("|".join(tokens), end) if tokens else None
        if closing is None:
            raise self._unclear("does not close an assistant turn with a special token")
        self.closing_token = closing.group()
        self._closing = end[: closing.end()]
        self._lead = self._answer_prefix(header, user)

    def find(self, text: str, turns: Sequence[Turn], *, generation: bool = False) -> list[tuple[int, int]]:
        """Start and end of each answer, in characters, in the rendered ``text`` of ``turns``.

        Raises UserError if the text of an answer is not where the template puts other texts.
        """
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        if not answers:
            return []
        marks = iter([_mark(number) for number in range(len(answers))])
        marked = [{**turn, "content": next(marks)} if turn["role"] == "assistant" else turn for turn in turns]
        rendered = self._template.render(marked, generation=generation)
        pieces = self._split(rendered, [_mark(number) for number in range(len(answers))])
        spans, end = [], 0
        for answer, header, following in zip(answers, pieces, pieces[1:], strict=False):
            start, lead = end + len(header), self._lead
            if not text.startswith(header, end):
                # An answer that has thinking has no empty thinking block.
                short = header.rpartition(THINKING[0])[0]
                if not short or not text.startswith(short, end):
                    raise self._unclear("does not begin each assistant turn in the same way")
                start, lead = end + len(short), ""
            if not text[:start].endswith(lead):
                lead = ""
            stop = self._after(text, answer.strip(), start)
            is_closed = following.startswith(self._closing)
            close = self._closing if is_closed else following
            after_close = self._after(text, close.lstrip(), stop)
            end = after_close - len(close)
            spans.append((start - len(lead), after_close if is_closed else stop))
        return spans

    def _answer_prefix(self, header: str, user: Turn) -> str:
        """What precedes an answer's content and is not part of the generation prompt, such as the space after [/INST]."""
        if header.endswith(EMPTY_THINKING):
            return EMPTY_THINKING if self._template.thinking else ""
        prompt, bare = (
            self._split(self._template.render([user], generation=generation), [_mark(0)])[1]
            for generation in (True, False)
        )
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(header, prompt, strict=False)))
        lead = header[common:]
        # A template without generation prompt, whose header then is not what the model writes.
        return "" if prompt == bare and lead.strip() else lead

    def _after(self, text: str, part: str, start: int) -> int:
        """The end of ``part`` in ``text``, which begins at ``start`` or after white space."""
        begin = text.find(part, start)
        if begin < 0 or text[start:begin].strip():
            raise self._unclear("changes the text of an assistant turn")
        return begin + len(part)

    def _split(self, text: str, marks: Sequence[str]) -> list[str]:
        pieces = []
        for mark in marks:
            piece, separator, text = text.partition(mark)
            if not separator:
                raise self._unclear("leaves out the text of a turn")
            pieces.append(piece)
        return [*pieces, text]

    def _unclear(self, what: str) -> UserError:
        return UserError(
            f"tokenizer: the chat template of {self._template.folder} {what}; finch cannot know what to train on"
        )


def _mark(number: int) -> str:
    """Text in Unicode's private use area, which no conversation has."""
    return f"\ue000{number}\ue001"
