"""Rows as conversations: which turns are learned, what becomes a turn, and what is refused since it changes what is learned."""

import json
import re

import pytest

from finch.base.errors import UserError
from finch.data.formats import RowToMessages, detect_columns, unused_fields

SAID = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}


class Reader:
    """A tokenizer whose template reads calls and tools."""

    @staticmethod
    def reads(field):
        return field in ("tools", "tool_calls", "name")


def messages_of(row, **options):
    return RowToMessages(detect_columns(row, row), tokenizer=Reader(), **options)(row)["messages"]


def said(messages):
    return [(message.role, message.text_content, message.masked) for message in messages]


@pytest.mark.parametrize(
    ("mark", "is_learned"),
    [
        *(({key: value}, value) for key in ("weight", "train", "training", "loss") for value in (0, 1)),
        ({"weight": 0.0}, False),
        ({"train": None}, True),
        ({"masked": True}, False),
        ({"masked": False}, True),
    ],
)
def test_turns_say_whether_they_are_learned(mark, is_learned):
    user, wrong, other = SAID
    turns = [user, {**wrong, **mark}, other, {"role": "assistant", "content": "4"}]
    masked = [message.masked for message in messages_of({"messages": turns})]
    assert masked == [True, not is_learned, True, False]


def test_columns_that_become_turns():
    row = {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["d", "e"]]}
    conversation = [("user", "d", True), ("assistant", "e", False), ("user", "a\nb", True), ("assistant", "c", False)]
    assert said(messages_of(row)) == [("system", "s", True), *conversation]
    assert said(messages_of(row, new_system_prompt="t"))[0] == ("system", "t", True)
    assert said(messages_of({**row, "system": "", "history": None})) == conversation[2:]
    turns = [{"role": "system", "content": "s"}, *SAID[:2]]
    assert len(messages_of({"messages": turns, "system_prompt": "s"})) == 3


def test_calls_and_tools_reach_the_template_as_they_are():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    tool = {"role": "tool", "content": "4", "name": "add", "id": None}
    turns = [
        SAID[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        tool,
        {"role": "assistant", "content": "4"},
    ]
    parameters = {"properties": {"a": {"type": "integer", "default": None}}}  # of a text nothing is taken
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    row = {"messages": turns, "tools": json.dumps(tools)}
    sample = RowToMessages(detect_columns(row, row), tokenizer=Reader())(row)
    assert sample["tools"] == json.loads(row["tools"])
    assert [getattr(message, "fields", {}) for message in sample["messages"]] == [
        {}, {"tool_calls": [call], "content": None}, {"name": "add"}, {}]  # fmt: skip


MESSAGES = {"messages": [*SAID[:2]]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "its label is false: these are preferences, for KTO"),
        (
            {"messages": [SAID[0], {**SAID[1], "weight": 0.5}]},
            "its turn 2 has weight 0.5; finch learns a turn or does not",
        ),
        ({"messages": [SAID[0], {**SAID[1], "train_detail": [1]}]}, "its turn 2 has train_detail"),
        ({"messages": [{**SAID[0], "train": True}, SAID[1]]}, "its turn 1 is of role user and to be learned"),
        ({**MESSAGES, "tools": "["}, "its field 'tools' is not JSON"),
        ({**MESSAGES, "tools": [1]}, "its field 'tools' is not a list of JSON schemas"),
        ({**MESSAGES, "system": 3}, "its field 'system' is int, not text"),
        (
            {"messages": [{"role": "system", "content": "a"}, *SAID[:2]], "system": "b"},
            "it has a system turn and another text in its field 'system'",
        ),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "its field 'history' is not a list of pairs"),
        (
            {"messages": [SAID[0], {"role": "assistant", "tool_calls": [{}]}]},
            "its turn 2 has a tool call that names no",
        ),
    ],
)
def test_what_changes_what_is_learned_is_refused(row, message):
    with pytest.raises(UserError, match=re.escape(message)):
        messages_of(row)


def test_what_no_template_writes_is_refused():
    for row, message in (
        ({**MESSAGES, "tools": [{"name": "add"}]}, "it has tools, which the tokenizer's chat template does not write"),
        ({"messages": [SAID[0], {**SAID[1], "tool_calls": [{"name": "a"}]}]}, "its turn 2 has tool_calls, which the"),
    ):
        with pytest.raises(UserError, match=message):
            RowToMessages(detect_columns(row, row))(row)  # torchtune's tokenizers write none


def test_train_on_input_learns_no_turn_that_says_no():
    row = {"messages": [SAID[0], {**SAID[1], "weight": 0}]}
    with pytest.raises(UserError, match=r"its turn 2 is not to be learned, but dataset\.train_on_input=True"):
        messages_of(row, train_on_input=True)


def test_unused_fields_are_named():
    turns = [{**SAID[0], "name": "A", "id": 3}, {**SAID[1], "weight": 1, "reasoning": "x", "note": None}]
    row = {"messages": turns, "system": "s", "tools": None, "source": "web", "score": None}
    assert unused_fields(row, detect_columns(row, row), Reader()) == ["source", "messages[].id", "messages[].reasoning"]
    row = {"text": "a", "system": "s"}
    assert unused_fields(row, detect_columns(row, row)) == ["system"]
