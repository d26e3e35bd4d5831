"""From a row of any chat or instruction format to the messages that torchtune's tokenizers take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchtune.data import Message
from torchtune.modules.transforms import Transform

from finch.data.formats import TURN_KEYS, RowFormat
from finch.errors import UserError

# torchtune calls a tool's answer "ipython".
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "ipython",
    "function": "ipython",
    "observation": "ipython",
    "ipython": "ipython",
}


class RowToMessages(Transform):
    """Makes each row a conversation. Every assistant turn is a target, except those that belong to a prompt.

    A question or prompt becomes a user turn, its answer or completion an assistant turn; prompt and completion may each be a list of
    messages, as in TRL. An instruction and its input become one user turn, with a line break between them, as in LLaMA-Factory.

    Args:
        row_format: the rows' format and columns; any but ``text``.
        train_on_input: whether turns that are not the assistant's are targets too.
        new_system_prompt: a system turn before each conversation, instead of its own; never a target.
    """

    def __init__(
        self, row_format: RowFormat, *, train_on_input: bool = False, new_system_prompt: str | None = None
    ) -> None:
        self._format, self._columns = row_format.format, row_format.columns
        self._train_on_input, self._new_system_prompt = train_on_input, new_system_prompt

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, list[Message]]:
        """
        Raises:
            UserError: a field is missing or not text, a role is unknown, or the order of turns is not a conversation's.
        """
        messages = list(self._messages(sample))
        if self._new_system_prompt is not None:
            messages = [message for message in messages if message.role != "system"]
            messages.insert(0, Message(role="system", content=self._new_system_prompt, masked=True))
        check_turns(messages)
        return {"messages": messages}

    def _messages(self, sample: Mapping[str, Any]) -> Iterable[Message]:
        values = {field: sample.get(column) for field, column in self._columns.items()}
        for field, column in self._columns.items():
            if values[field] is None and field != "input":
                raise UserError(f"it has no field {column!r}")
        if self._format in TURN_KEYS:
            (turns,) = values.values()
            return self._conversation(turns, *TURN_KEYS[self._format])
        if self._format == "prompt_completion":
            prompt, completion = values["prompt"], values["completion"]
            return [*self._turns(prompt, "user", is_prompt=True), *self._turns(completion, "assistant")]
        if self._format == "instruction":
            request = "\n".join(filter(None, (self._text(values, "instruction"), self._text(values, "input"))))
            return [self._message("user", request), self._message("assistant", self._text(values, "output"))]
        return [
            self._message("user", self._text(values, "question")),
            self._message("assistant", self._text(values, "answer")),
        ]

    def _text(self, values: Mapping[str, Any], field: str) -> str:
        value = values.get(field)
        if value is None:
            return ""  # the optional input
        if not isinstance(value, str):
            raise UserError(f"its field {self._columns[field]!r} is {type(value).__name__}, not text")
        return value

    def _turns(self, value: Any, role: str, is_prompt: bool = False) -> list[Message]:
        if not isinstance(value, str):
            return self._conversation(value, *TURN_KEYS["messages"], is_prompt=is_prompt)
        return [self._message(role, value)]

    def _conversation(self, turns: Any, role_key: str, content_key: str, is_prompt: bool = False) -> list[Message]:
        if not isinstance(turns, list):
            raise UserError(f"its conversation is {type(turns).__name__}, not a list of turns")
        messages = []
        for number, turn in enumerate(turns, start=1):
            if not isinstance(turn, dict) or turn.get(role_key) is None:
                raise UserError(f"its turn {number} has no {role_key!r}")
            role = ROLES.get(turn[role_key])
            if role is None:
                raise UserError(
                    f"its turn {number} has the unknown role {turn[role_key]!r}; known are {', '.join(ROLES)}"
                )
            if turn.get("tool_calls"):
                raise UserError(
                    f"its turn {number} has tool_calls, which are not rendered; write the call into {content_key!r}"
                )
            messages.append(self._message(role, _content(turn.get(content_key), number), is_prompt))
        return messages

    def _message(self, role: str, content: Any, is_prompt: bool = False) -> Message:
        is_masked = (role != "assistant" or is_prompt) and not self._train_on_input
        return Message(role=role, content=content, masked=is_masked)


def check_turns(messages: list[Message]) -> None:
    """Checks the order of turns: an optional system turn, then user and assistant in turns; tool turns follow an assistant's.

    Raises:
        UserError: what is wrong, and at which turn.
    """
    if all(message.role != "assistant" for message in messages):
        raise UserError("its conversation has no assistant turn")
    allowed = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "ipython": ("assistant", "ipython")}
    allowed["assistant"] = ("user", "ipython")
    last = ""
    for number, message in enumerate(messages, start=1):
        if message.role not in allowed[last]:
            expected = " or ".join("tool" if role == "ipython" else role for role in allowed[last])
            raise UserError(f"its turn {number} is {message.role}'s, expected is {expected}")
        last = message.role


def _content(value: Any, number: int) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(
            f"the content of its turn {number} is {'missing' if value is None else type(value).__name__}, not text"
        )
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"the content of its turn {number} has parts that are not text; finch trains on text alone")
    return [{"type": "text", "content": part["text"]} for part in value]
