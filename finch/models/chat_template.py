"""A folder's chat template: from messages to the text that the model reads, rendered as transformers renders it.

Also where the answers are in that text: from the end of the generation prompt to the closing token.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from finch.base.errors import UserError
from finch.models import chat_environment
from finch.models.chat_environment import CPU_SECONDS, RENDER_ERRORS, in_time
from finch.models.hf_config import read_settings

CHAT_TEMPLATE = "chat_template.jinja"
_TOOL_USE = "additional_chat_templates/tool_use.jinja"
THINKING = ("<think>", "</think>")
THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn under which data sets have what an answer was thought to be; the first one that is there counts, as in transformers."""
_PLAIN = {"role", "content"}
Turn = Mapping[str, Any]
"""``role``, ``content``, a text, and what else templates read: ``tool_calls``, ``reasoning_content`` and others."""
Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the functions that an assistant may call."""


class ChatTemplate:
    """A chat template with the variables it is rendered with.

    Args:
        source: Jinja source; rendered in a sandbox, as transformers does.
        folder: where it comes from, for messages.
        special_tokens: by transformers' names, such as ``bos_token``; templates write some of them.
        thinking: the template's ``enable_thinking``.
        today: the day that ``strftime_now`` knows.

    Raises UserError if the source is no template, or does not render a short conversation within 5 s and 2 GB.
    """

    def __init__(
        self,
        source: str,
        folder: Path,
        special_tokens: Mapping[str, str],
        *,
        thinking: bool = False,
        today: datetime.date | None = None,
    ) -> None:
        self.source, self.folder, self.thinking = source, folder, thinking
        self.today = today or datetime.date.today()  # rows do not change at midnight
        self._variables = {"documents": None, **special_tokens, "enable_thinking": thinking}
        self._endless = ""  # how it has failed to end
        # Before it is compiled here: Jinja computes expressions of constants as it compiles, without any limit.
        try_template(source, self._variables, folder)
        try:
            self._template = chat_environment.environment(lambda form: self.today.strftime(form)).from_string(source)
            # Jinja's own is a ChainMap, slow to copy, and each rendering copies it.
            self._template.globals = dict(self._template.globals)
        except RENDER_ERRORS as error:
            raise UserError(f"tokenizer: the chat template of {folder} cannot be read ({error}); fix it") from error

    @property
    def fingerprint(self) -> list[Any]:
        """All that a rendered text depends on; the day only where the template reads it."""
        return [self.source, self._variables, str(self.today) if "strftime_now" in self.source else None]

    def render(self, turns: Sequence[Turn], tools: Tools = None, *, generation: bool = False) -> str:
        """The text of a conversation; with ``generation`` it ends in the header of the next assistant turn.

        Raises UserError if the template refuses the conversation, or takes more than 5 s, and then for each further one.
        """
        try:
            variables = {**self._variables, "tools": tools, "messages": turns, "add_generation_prompt": generation}
            if self._endless:  # each row would take as long
                raise TimeoutError(self._endless)
            return in_time(self._template.render, variables)
        except TimeoutError as error:
            self._endless = str(error)
            # No folder in these: they are kept with the rows, and found again by a copy of the tokenizer elsewhere.
            raise UserError(f"tokenizer: {error}") from error
        except RENDER_ERRORS as error:
            raise UserError(f"tokenizer: its chat template refuses a conversation ({error})") from error


def read_chat_template(folder: Path) -> str | None:
    """A folder's chat template: chat_template.jinja, or the field of tokenizer_config.json; None without one. Of several by name the one called
    default, and tool_use for rows with tools, as transformers chooses. Raises UserError if none is called default."""
    config, files = folder / "tokenizer_config.json", {"default": CHAT_TEMPLATE, "tool_use": _TOOL_USE}
    found = read_settings(config).get("chat_template") if config.is_file() else None
    if (folder / CHAT_TEMPLATE).is_file():
        there = {name: folder / file for name, file in files.items() if (folder / file).is_file()}
        found = [{"name": name, "template": file.read_text(encoding="utf-8")} for name, file in there.items()]
    if not isinstance(found, list):
        return found
    texts = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("template"), str)]
    named = {entry.get("name"): entry["template"] for entry in texts}
    if "default" not in named:
        raise UserError(f"tokenizer: {config} has chat templates, but none named default; name one so")
    if "tool_use" not in named:
        return named["default"]
    # Jinja drops a line break after a tag, and the last one of a template.
    own, other = (named[name].removesuffix("\n") for name in ("default", "tool_use"))
    return f"{{% if tools %}}\n{other}{{% else %}}\n{own}{{% endif %}}"


def try_template(source: str, variables: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError if a template takes too much for a short conversation: somebody else wrote it, so a child process tries it first."""
    if problem := _problem(json.dumps({"source": source, "variables": variables}, default=str)):
        raise UserError(f"tokenizer: the chat template of {folder} does not end well ({problem}); fix or remove it")


@functools.cache
def _problem(job: str) -> str | None:
    # Isolated, so that no module in the current folder, or next to the program, takes the place of one that it imports.
    command = [sys.executable, "-I", chat_environment.__file__]
    child = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    if child.returncode < 0:
        return f"it was stopped by signal {-child.returncode}, after up to {CPU_SECONDS} s"
    return (child.stderr.strip().splitlines() or ["it failed"])[-1] if child.returncode else None


@dataclass(frozen=True)
class _Answer:
    """What a template writes around an assistant turn.

    Attributes:
        prompt: what follows the content before it where generation starts at this turn.
        header: the part of ``prompt`` that the turn has where it does not begin with all of it: an earlier answer without its thinking block.
        after: what follows the content.
    """

    prompt: str
    header: str
    after: str


@dataclass(frozen=True)
class _Shape:
    """What a template writes around the contents of a conversation of certain roles.

    Attributes:
        pieces: the text before, between and after the contents.
        order: the turns that these contents belong to.
        answers: by the index of each assistant turn.
    """

    pieces: list[str]
    order: list[int]
    answers: dict[int, _Answer]


class AnswerSpans:
    """Finds what the model writes itself: all that follows the generation prompt in an assistant turn, with the closing token.

    The template is rendered with marks in place of contents. So nothing needs to be known about its family, and a text that looks like a
    header of a turn is not taken for one. Marks are rendered once for conversations of the same roles; only a conversation whose answers the
    template changes, such as one with tool calls or thinking, is rendered a second time.

    Attributes:
        closing_tokens: those of ``added_tokens`` that end an assistant turn, one after the other.
        prompt_problem: why a tuned model is asked from another prompt than it learned to answer; None: it is not.

    Raises:
        UserError: the template leaves an assistant turn out or does not close it.
    """

    def __init__(self, template: ChatTemplate, added_tokens: Iterable[str]) -> None:
        self._template = template
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        # The longest first, since an expression takes the first alternative that fits, and one token may begin another.
        tokens = sorted((re.escape(token) for token in added_tokens if token.strip()), key=len, reverse=True)
        self._tokens = re.compile("|".join(tokens) or "(?!)")
        user, answer = ({"role": role, "content": ""} for role in ("user", "assistant"))
        prompt, bare = (self._split([user], {0}, generation=each)[0] for each in (True, False))
        self._has_prompt = prompt != bare
        shape = self._shape([user, answer])
        (_, before, end), start = shape.pieces, shape.answers[1].prompt
        self.prompt_problem = None
        if not before.startswith(start):
            self.prompt_problem = (
                f"the chat template of {template.folder} starts an answer with {start[-40:]!r}, but writes {before[-40:]!r} before those in rows: "
                "the tuned model is asked from another prompt than it learned; give a template that writes both alike"
            )
        first = self._tokens.search(end)
        if first is None:
            raise self._unclear("does not close an assistant turn with a special token")
        self.closing_tokens, stop = [first.group()], first.end()
        self._closings = [end[:stop]]  # the longest comes first: a template may end its last turn with one token more
        while following := self._tokens.match(end, stop):
            self.closing_tokens.append(following.group())
            stop = following.end()
            self._closings.insert(0, end[:stop])

    def find(
        self, text: str, turns: Sequence[Turn], tools: Tools = None, *, generation: bool = False
    ) -> list[tuple[int, int]]:
        """Start and end of each answer, in characters, in the rendered ``text`` of ``turns``.

        Raises:
            UserError: an answer is not where the template puts other texts.
        """
        if all(turn["role"] != "assistant" for turn in turns):
            return []
        shape = self._shape(turns, tools, generation=generation)
        others = {index for index, turn in enumerate(turns) if turn["role"] != "assistant"}
        if tools is None and all(turn.keys() == _PLAIN for turn in turns):
            for form in (str, str.strip):  # as the template may write it
                pieces, order = [shape.pieces[0]], []
                for index, piece in zip(shape.order, shape.pieces[1:], strict=True):
                    if index in others:
                        order.append(index)
                        pieces.append(piece)
                    else:
                        pieces[-1] += form(turns[index]["content"]) + piece
                if follows := _follow(text, turns, pieces, order):
                    return [
                        self._span(*follows[index - 1], each, turns[index]) for index, each in shape.answers.items()
                    ]
        # The template changes answers, such as those with thinking or calls: only the other contents are marked.
        pieces, order = self._split(turns, others, tools, generation=generation)
        if not (follows := _follow(text, turns, pieces, order)):
            raise self._unclear("does not write all turns of a role in the same way")
        spans = []
        for index, answer in shape.answers.items():
            begin, piece = follows[index - 1]
            if calls := turns[index].get("tool_calls"):
                alone, _ = self._split(turns[: index + 1], others, tools, generation=False)
                answer = replace(answer, after=self._after_calls(piece, alone[-1], tool_name(calls[-1])))
            spans.append(self._span(begin, piece, answer, turns[index]))
        return spans

    def _after_calls(self, piece: str, alone: str, name: str) -> str:
        """What follows a turn's calls in ``piece``; ``alone``: the same where it is the last turn, which a special token ends."""
        for end in reversed([found.end() for found in self._tokens.finditer(alone)]):
            last_call = alone[alone.rfind(name, 0, end) : end]
            if name in last_call and last_call in piece:
                # The last one, since a turn may make the same call twice.
                return piece[piece.rindex(last_call) + len(last_call) :]
        raise self._unclear("leaves out a tool call, or does not end it with a special token")

    def _span(self, begin: int, piece: str, answer: _Answer, turn: Turn) -> tuple[int, int]:
        """Start and end of the answer in ``piece``, which follows the content before it and starts at ``begin``."""
        head = answer.prompt if piece.startswith(answer.prompt) else answer.header
        stop = len(piece) - len(answer.after)
        is_written = visible(turn.get("content", "")) in piece[len(head) : stop]
        if not piece.startswith(head) or not piece.endswith(answer.after) or not is_written:
            raise self._unclear("does not begin and end each assistant turn in the same way")
        closing = next((each for each in self._closings if answer.after.startswith(each)), "")
        return begin + len(head), begin + stop + len(closing)

    def _shape(self, turns: Sequence[Turn], tools: Tools = None, *, generation: bool = False) -> _Shape:
        """What the template writes around contents. It may need to see the calls that a tool's answer belongs to."""
        has_calls = any("tool_calls" in turn for turn in turns)
        key = (*(turn["role"] for turn in turns), generation)
        # Calls are part of what is rendered, so that roles alone do not tell two conversations with calls apart.
        if not has_calls and (known := self._shapes.get(key)) is not None:
            return known
        if has_calls:
            turns = [{name: value for name, value in turn.items() if name not in THINKING_FIELDS} for turn in turns]
        else:
            turns, tools = [{"role": turn["role"], "content": ""} for turn in turns], None
        marked = {index for index, turn in enumerate(turns) if "tool_calls" not in turn}
        pieces, order = self._split(turns, marked, tools, generation=generation)
        answers = {}
        for index in (n for n, turn in enumerate(turns) if turn["role"] == "assistant" and n):
            prompt = self._split(turns[:index], marked, tools, generation=True)[0][-1]
            header, after = prompt, ""
            if index in marked:
                before, after = pieces[order.index(index) :][:2]
                header = common_prefix(prompt, before)
                if not self._has_prompt and before[len(header) :].strip():
                    prompt = header = before  # the template's header is not what the model writes
            # An answer may have its own thinking in place of the prompt's empty block: the header ends before either.
            if THINKING[0] in header:
                header = header.rpartition(THINKING[0])[0]
            answers[index] = _Answer(prompt, header, after)
        shape = _Shape(pieces, order, answers)
        if not has_calls:
            self._shapes[key] = shape
        return shape

    def _split(
        self, turns: Sequence[Turn], marked: Collection[int], tools: Tools = None, *, generation: bool
    ) -> tuple[list[str], list[int]]:
        """The text around the contents of the ``marked`` turns, and the order of these."""
        replaced = [{**turn, "content": f"\ue000{n}\ue001"} if n in marked else turn for n, turn in enumerate(turns)]
        parts = _MARK.split(self._template.render(replaced, tools, generation=generation))
        order = list(map(int, parts[1::2]))
        if sorted(order) != sorted(n for n in marked if n < len(turns)):
            raise self._unclear("leaves out the text of a turn")
        return parts[::2], order

    def _unclear(self, what: str) -> UserError:
        return UserError(f"tokenizer: its chat template {what}; finch cannot know what to train on")


def _follow(
    text: str, turns: Sequence[Turn], pieces: Sequence[str], order: Sequence[int]
) -> dict[int, tuple[int, str]] | None:
    """By turn, where the piece after its content starts in ``text``, and that piece; None: ``text`` is not made of these pieces."""
    if not text.startswith(pieces[0]):
        return None
    end, found = len(pieces[0]), {}
    for number, (index, piece) in enumerate(zip(order, pieces[1:], strict=True), start=1):
        content, is_last = turns[index]["content"], number == len(order)
        ends = [
            end + len(form)
            for form in (content, content.strip(), content.rstrip(), content.lstrip())
            if text.startswith(form, end)
        ]
        ends += [len(text) - len(piece) if is_last else text.find(piece, end)]  # a content that the template changes
        fits = (each for each in ends if each >= end and text.startswith(piece, each))
        stop = next((each for each in fits if not is_last or each + len(piece) == len(text)), None)
        if stop is None:
            return None
        found[index] = stop, piece
        end = stop + len(piece)
    return found


def visible(answer: str) -> str:
    """An answer without its thinking."""
    return answer.rpartition(THINKING[1])[2].strip()


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of the function that a tool or a call has, in OpenAI's form or without its outer object."""
    return str(tool.get("function", tool).get("name", ""))


def common_prefix(one: str, other: str) -> str:
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


_MARK = re.compile("\ue000(\\d+)\ue001")  # in Unicode's private use area, which no conversation has
