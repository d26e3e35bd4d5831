"""Rows as conversations: which turns are learned, what becomes a turn, and what is refused since it changes what is learned."""

import dataclasses
import json
import re

import pytest

from finch.base.errors import UserError
from finch.data.formats import RowToMessages, detect_columns, unused_fields

SAID = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}
PARAMETERS = {"name": "add", "parameters": {"a": 2}}


MESSAGES = {"messages": [*SAID[:2]]}


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(
            ({"prompt": "a", "completion": "b", "label": label}, "its label is false: these are preferences, for KTO")
            for label in (False, "False", "false")
        ),
        ({**MESSAGES, "label": False}, "its label is false: these are preferences, for KTO"),
        ({"question": "a", "answer": "b", "kto_tag": False}, "its kto_tag is false: these are preferences, for KTO"),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "chosen": {"value": "c"},
                "rejected": {"value": "d"},
            },
            "it has chosen and rejected answers, for DPO; finch learns one: give rows of the chosen",
        ),
        ({**MESSAGES, "functions": [{"name": "add"}]}, "it has functions, OpenAI's old form; give them as tools"),
        (
            {"messages": [SAID[0], {**SAID[1], "function_call": {"name": "add", "arguments": "{}"}}]},
            "its turn 2 has function_call, OpenAI's old form; give it as tool_calls",
        ),
        (
            {"question": "a", "answer": "b", "system": "c", "system_prompt": "d"},
            "another system text than that in its field 'system_prompt'",
        ),
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
            "it has another system text than that in its field 'system'; keep one of them",
        ),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "its field 'history' is not a list of pairs"),
        (
            {"messages": [SAID[0], {"role": "assistant", "tool_calls": [{}]}]},
            "its turn 2 has a tool call that names no",
        ),
        *(
            (row, "its turn 2 has a tool call without arguments; rename its parameters, or give {}")
            for row in (
                {"messages": [SAID[0], {**SAID[1], "tool_calls": [{"function": PARAMETERS}]}]},
                {
                    "conversations": [
                        {"from": "human", "value": "a"},
                        {"from": "function_call", "value": json.dumps(PARAMETERS)},
                    ]
                },
            )
        ),
    ],
)
def test_what_changes_what_is_learned_is_refused(row, message):
    with pytest.raises(UserError, match=re.escape(message)):
        messages_of(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "b", "label": "true"},
        {"prompt": "a", "completion": "b", "label": 0},  # a class
        {**MESSAGES, "functions": None},
        {**MESSAGES, "chosen": "c", "rejected": None},
        {"question": "a", "answer": "b", "functions": ["f"], "system": "c", "system_prompt": "c"},
        {"messages": [SAID[0], {**SAID[1], "function_call": None}]},
    ],
)
def test_what_changes_nothing_is_not_refused(row):
    assert messages_of(row)[-1].masked is False


def test_the_chosen_answers_of_preferences_are_learned():
    row = {**MESSAGES, "chosen": MESSAGES["messages"], "rejected": MESSAGES["messages"]}
    row_format = detect_columns(row, row, column_map={"messages": "chosen"})
    assert len(RowToMessages(row_format)(row)["messages"]) == 2


CALL = '{"name": "add", "arguments": {"a": null}}'
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": None}}}


@pytest.mark.parametrize("source", ["json", "parquet"])
@pytest.mark.parametrize(
    ("value", "calls"),
    [
        (CALL, [CALLED]),
        (f"[{CALL}, {CALL}]", [CALLED, CALLED]),
        ('{"name": "add"}', [{"type": "function", "function": {"name": "add"}}]),
        ("add 2", None),
        ("[]", None),
        ("3", None),
        ("{'name': 'add', 'arguments': {}}", None),
        ('{"action": "add", "action_input": {}}', None),
    ],
)
def test_calls_of_sharegpt_reach_the_template_as_calls(value, calls, source):
    turns = [("human", "2+2"), ("function_call", value), ("observation", "4"), ("gpt", "4")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    row_format = dataclasses.replace(detect_columns(row, row), source=source)
    if calls is None:  # the model would learn to write the text, and no call
        with pytest.raises(UserError, match="its turn 2 is a function_call that is no JSON of a name and arguments"):
            RowToMessages(row_format, tokenizer=Reader())(row)
    else:
        found = RowToMessages(row_format, tokenizer=Reader())(row)["messages"][1]
        assert (found.fields["tool_calls"], found.text_content) == (calls, "")
    assert RowToMessages(row_format)(row)["messages"][1].text_content == value  # torchtune's tokenizers write no calls


def test_what_no_template_writes_is_refused():
    for row, message in (
        ({**MESSAGES, "tools": [{"name": "add"}]}, "it has tools, which the tokenizer's chat template does not write"),
        ({"messages": [SAID[0], {**SAID[1], "tool_calls": [{"name": "a"}]}]}, "its turn 2 has tool_calls, which the"),
    ):
        with pytest.raises(UserError, match=message):
            RowToMessages(detect_columns(row, row))(row)  # torchtune's tokenizers write none


@pytest.mark.parametrize("own", [{}, {"system": "Be brief."}])
def test_train_on_input_learns_a_system_column_and_no_new_prompt(own):
    row = {"messages": [*SAID], **own} if own else {"messages": [{"role": "system", "content": "Be brief."}, *SAID]}
    for train, new, is_masked in ((True, None, False), (False, None, True), (True, "Be kind.", True)):
        first = messages_of(row, train_on_input=train, new_system_prompt=new)[0]
        assert (first.text_content, first.masked) == (new or "Be brief.", is_masked)


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
