"""The formats of rows, how a file's format is found by the names and types of its fields, and the messages that a row becomes."""

from __future__ import annotations

import functools
import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune.data import Message
from torchtune.modules.transforms import Transform

from finch.base.errors import UserError
from finch.data.cache import remembered
from finch.data.row_files import describe_faults, local_files, source_of, without_none
from finch.data.table import Table, read_table

AUTO = "auto"
# Formats, their fields, and the column names that a field may have. The first format that fits is taken: rows of conversations often
# carry the rendered text or the first prompt as well.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversations", "conversation")},
    "sharegpt": {"conversations": ("conversations", "conversation", "messages")},
    "instruction": {"instruction": ("instruction",), "input": ("input", "context"), "output": ("output", "response")},
    "question_answer": {"question": ("question", "query"), "answer": ("answer", "response")},
    "prompt_completion": {"prompt": ("prompt", "input"), "completion": ("completion", "response", "output")},
    "text": {"text": ("text",)},
}
OPTIONAL = {"instruction": "input"}
LABELS = {
    "messages": "messages (role/content)",
    "sharegpt": "ShareGPT conversations (from/value)",
    "instruction": "instruction/input/output",
    "question_answer": "question/answer",
    "prompt_completion": "prompt/completion",
    "text": "text",
}
TURN_KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}


@dataclass(frozen=True)
class RowFormat:
    """What a file's rows hold.

    Attributes:
        format: a key of ``FIELDS``.
        columns: from the format's fields to the file's columns.
        source: the datasets library's reader, ``json``, ``csv`` or ``parquet``, or a name on the hub; None: not known.
        num_rows: rows of all files; None: not counted.
        unused_columns: the file's other columns, which training does not see.
    """

    format: str
    columns: dict[str, str]
    source: str | None = None
    num_rows: int | None = None
    unused_columns: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The format's name for messages."""
        return LABELS[self.format]


def detect(
    data_files: str | Iterable[str], source: str | None = None, column_map: Mapping[str, str] | None = None
) -> RowFormat:
    """Finds the format of local files. Every row is read, since one file may hold rows of several formats.

    Args:
        data_files: a path, a pattern such as ``rows/*.jsonl``, or a list of them: .jsonl, .json (an array or one object per line), .csv,
            .parquet, .arrow; the first three also with .gz.
        source: ``json``, ``csv`` or ``parquet``; None: by the files' extensions.
        column_map: from a format's fields to the files' columns, for columns with other names.

    Raises UserError for a file that is missing, empty, a directory or of an unknown kind, and for rows that are not JSON, of no known format,
    or of another one than the first row.
    """
    files = local_files(data_files)
    source = source or source_of(files)
    return format_of_table(read_table(files, source), source, column_map)


def format_of_table(table: Table, source: str, column_map: Mapping[str, str] | None) -> RowFormat:
    """:func:`detect` of local files that are open."""
    column_map = dict(column_map or {})
    title = str(table.parts[0].file)
    found = remembered(
        ["format", *table.key, source, column_map], lambda: asdict(_detect(table, source, column_map)), title
    )
    return RowFormat(**{**found, "unused_columns": tuple(found["unused_columns"])})


def _detect(table: Table, source: str, column_map: Mapping[str, str]) -> RowFormat:
    first: str | None = None
    unknown: str | None = None
    names: dict[str, None] = {}
    for rows in table.parts:
        others: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(rows, start=1):
            names.update(dict.fromkeys(row))
            if first is None:
                first = format_of_map(column_map) if column_map else format_of(row)
                first_file = rows.file
                if first is None:  # a row that is broken is named when all rows are read: together with those like it
                    unknown = unknown or f"data_files={rows.file}: {_unknown(row, number)}"
            elif not column_map and not _fits(first, row):
                other = format_of(row)
                if other is not None and other != first:
                    others[f"is {LABELS[other]}"].append(number)
        if others and first is not None:
            before = f"the rows of {first_file} are" if rows.file != first_file else "the rows before it are"
            raise UserError(
                f"data_files={rows.file}: {describe_faults(others)}, {before} {LABELS[first]}; one dataset holds one format: give each format a file and an entry "
                "in a list of datasets"
            )
        if not len(rows):
            raise UserError(f"data_files is empty: {rows.file} has no rows; give another file")
    if first is None:
        raise UserError(str(unknown))
    return _with_columns(first, names, column_map, source, len(table))


def detect_columns(
    names: Iterable[str], row: Mapping[str, Any], format: str = AUTO, column_map: Mapping[str, str] | None = None
) -> RowFormat:
    """The format of a table's rows by its column names and one row. Raises UserError if there is no known format, or not the one that
    ``format`` names."""
    names = list(names)
    if format != AUTO and format not in FIELDS:
        raise UserError(f"dataset.format={format} must be one of {', '.join([AUTO, *FIELDS])}")
    if format == AUTO:
        format = (format_of_map(column_map) if column_map else format_of(row)) or ""
        if not format:
            raise UserError(f"dataset: {_unknown(row)}")
    looks = format_of(row)
    if not column_map and looks not in (None, format) and not _fits(format, row):
        raise UserError(f"dataset.format={format}, but the rows look like {LABELS[looks]}; set dataset.format={looks}")
    return _with_columns(format, names, column_map)


def format_of(row: Mapping[str, Any]) -> str | None:
    """The first format of ``FIELDS`` that a row fits; None: no known one."""
    return next((name for name in FIELDS if _fits(name, row)), None)


def format_of_map(column_map: Mapping[str, str]) -> str:
    """The format whose fields a column map names. Raises UserError if no format has these fields."""
    keys = set(column_map)
    if keys == {"input", "output"}:  # torchtune's names
        return "prompt_completion"
    for name, fields in FIELDS.items():
        if set(fields) - {OPTIONAL.get(name)} <= keys <= set(fields):
            return name
    known = "; ".join(", ".join(fields) for fields in FIELDS.values())
    raise UserError(
        f"dataset.column_map names the fields {', '.join(map(str, column_map))}, which are no row format's; name all fields of one: {known}"
    )


@functools.lru_cache(maxsize=1000)
def _columns(format: str, names: frozenset[str]) -> Mapping[str, str | None]:
    """Each field's column, None where it is missing; an optional field that is missing is left out."""
    columns = {
        field: next((column for column in synonyms if column in names), None)
        for field, synonyms in FIELDS[format].items()
    }
    if columns.get(OPTIONAL.get(format, ""), "") is None:
        del columns[OPTIONAL[format]]
    return columns


def _fits(format: str, row: Mapping[str, Any]) -> bool:
    # Without null fields: columnar files give every row the columns of all, also those of another format.
    columns = _columns(format, frozenset(name for name, value in row.items() if value is not None))
    return all(column is not None and _has_type(format, row[column]) for column in columns.values())


def _has_type(format: str, value: Any) -> bool:
    if format in TURN_KEYS:
        return _is_conversation(value, *TURN_KEYS[format])
    return isinstance(value, str) or (format == "prompt_completion" and _is_conversation(value, "role", "content"))


def _is_conversation(value: Any, role_key: str, content_key: str) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(turn, dict) and role_key in turn and (content_key in turn or turn.get("tool_calls"))
            for turn in value
        )
    )


def _with_columns(
    format: str,
    names: Iterable[str],
    column_map: Mapping[str, str] | None,
    source: str | None = None,
    num_rows: int | None = None,
) -> RowFormat:
    names = list(names)
    columns = dict(_columns(format, frozenset(names)))
    for field, column in _fields_of_map(format, column_map or {}).items():
        if column not in names:
            raise UserError(f"dataset.column_map.{field}={column}: the rows have no such column, only {_listed(names)}")
        columns[field] = column
    found = {field: column for field, column in columns.items() if column is not None}
    if missing := [field for field in columns if field not in found]:
        raise UserError(
            f"dataset.format={format} needs a column {missing[0]!r}; name it: dataset.column_map.{missing[0]}=COLUMN; the rows have {_listed(names)}"
        )
    unused = tuple(name for name in names if name not in {*found.values(), *_read_beside(format)})
    return RowFormat(format, found, source, num_rows, unused)


def _fields_of_map(format: str, column_map: Mapping[str, str]) -> dict[str, str]:
    """A column map with the format's own names of its fields, also where it has torchtune's ``input`` and ``output``."""
    fields = FIELDS[format]
    if len(fields) == 2 and set(column_map) == {"input", "output"}:
        return dict(zip(fields, (column_map["input"], column_map["output"]), strict=True))
    if unknown := [field for field in column_map if field not in fields]:
        raise UserError(
            f"dataset.column_map.{unknown[0]}: rows of {LABELS[format]} have no such field, they have {', '.join(fields)}"
        )
    return {field: str(column) for field, column in column_map.items()}


def _unknown(row: Mapping[str, Any], number: int = 1) -> str:
    """Why a row has no known format."""
    for format in FIELDS:
        columns = _columns(format, frozenset(row))
        named = [column for column in columns.values() if column is not None]
        if len(named) == len(columns):
            wrong = next(column for column in named if row[column] is None or not _has_type(format, row[column]))
            needed = "a list of turns with " + " and ".join(TURN_KEYS[format]) if format in TURN_KEYS else "text"
            return f"row {number}: the field {wrong!r} is {'null, ' if row[wrong] is None else ''}not {needed}; fix the rows"
    if {"chosen", "rejected"} <= row.keys():
        has_turns = isinstance(row["chosen"], list) and not isinstance(row.get("prompt"), list)
        columns = {"messages": "chosen"} if has_turns else {"prompt": "prompt", "completion": "chosen"}
        return (
            f"row {number} has the fields chosen and rejected: these are preferences, for DPO, which finch does not train; for fine-tuning on the "
            f"chosen answers: {' '.join(f'dataset.column_map.{field}={column}' for field, column in columns.items())}"
        )
    if len(row) == 1 and (separator := next((each for each in ";\t|" if each in str(next(iter(row)))), None)):
        return f"row {number} has one field, {_listed(row)!r}: its columns are separated by {separator!r}; separate them by commas"
    for format in TURN_KEYS:
        if found := [column for column, value in row.items() if _has_type(format, value)]:
            return f"row {number} has {LABELS[format]} in the column {found[0]!r}; name it: dataset.column_map.{next(iter(FIELDS[format]))}={found[0]}"
    return (
        "name the columns, such as dataset.column_map.question=COLUMN dataset.column_map.answer=COLUMN: "
        f"row {number} has the fields {_listed(row) or 'of no name'}, which are no known row format (docs/data.md)"
    )


def _listed(names: Iterable[str]) -> str:
    """Names of columns, not so many that a line would be cut."""
    return textwrap.shorten(", ".join(map(str, names)), 80, placeholder=" ...")


# torchtune calls a tool's answer "ipython".
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "ipython"),
}


LEARNED = ("weight", "train", "training", "loss")
"""Keys of a turn that say whether it is learned, true or 1, or only read, false or 0: OpenAI's, axolotl's and ms-swift's."""
_OF_ANY_ROLE = {"train", "training", "loss"}
SYSTEM = ("system", "system_prompt")
"""Columns with a system turn's text."""


class ChatMessage(Message):
    """torchtune's message with what else chat templates read of a turn.

    Args:
        fields: of the turn, such as ``tool_calls`` and ``reasoning_content``; a ``content`` of None: it has only calls.
        options: torchtune's.
    """

    def __init__(self, *, fields: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.fields = fields


class RowToMessages(Transform):
    """Makes each row a conversation. Every assistant turn is a target, except those that belong to a prompt or say that they are none.

    A question or prompt becomes a user turn, its answer or completion an assistant turn; prompt and completion may each be a list of
    messages, as in TRL. An instruction and its input become one user turn, with a line break between them, as in LLaMA-Factory, which
    ``history`` precedes. A column ``system`` or ``system_prompt`` becomes the system turn.

    Args:
        row_format: the rows' format and columns; any but ``text``.
        train_on_input: whether turns that are not the assistant's are targets too.
        new_system_prompt: a system turn before each conversation, instead of the one it has; never a target.
        tokenizer: whose ``reads``, if it has that, says which further fields of a turn reach its chat template.
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        train_on_input: bool = False,
        new_system_prompt: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._format, self._columns = row_format.format, row_format.columns
        self._train_on_input, self._new_system_prompt = train_on_input, new_system_prompt
        self._reads = fields_read_by(tokenizer)
        # Tables that are not JSON give every turn the keys that any turn has.
        self._clean = (lambda value: value) if row_format.source == "json" else without_none

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """``messages``, and ``tools`` where the row has some. Raises UserError if a field is missing or not text, a role is unknown, the order of
        turns is not a conversation's, or a field that changes what is learned is not understood."""
        # CSV has text; 0 may be a class.
        for key in ("label", "kto_tag") if self._format in ("prompt_completion", *TURN_KEYS) else ("kto_tag",):
            if str(sample.get(key)).lower() == "false":
                raise UserError(
                    f"its {key} is false: these are preferences, for KTO, which finch does not train; keep the rows whose {key} is true"
                )
        pair = [sample.get(name) for name in ("chosen", "rejected") if name not in self._columns.values()]
        if self._format in TURN_KEYS and len(pair) == 2 and None not in pair:
            raise UserError("it has chosen and rejected answers, for DPO; finch learns one: give rows of the chosen")
        messages = list(self._messages(sample))
        system = self._new_system_prompt
        if system is None:
            system = self._system_column(sample, messages)
        if system is not None:
            messages = [message for message in messages if message.role != "system"]
            is_masked = self._new_system_prompt is not None or not self._train_on_input
            messages.insert(0, Message(role="system", content=system, masked=is_masked))
        check_turns(messages)
        tools = self._tools(sample)
        return {"messages": messages, "tools": tools} if tools else {"messages": messages}

    def _system_column(self, sample: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
        found = None
        for column in SYSTEM:
            text = None if column in self._columns.values() else sample.get(column)
            if text is None or text == "":
                continue
            if not isinstance(text, str):
                raise UserError(f"its field {column!r} is {type(text).__name__}, not text")
            # A file may have the same text in several places; two different ones would leave open which is meant.
            own = next((message.text_content for message in messages if message.role == "system"), found or text)
            if own != text:
                raise UserError(f"it has another system text than that in its field {column!r}; keep one of them")
            found = text
        return found

    def _tools(self, sample: Mapping[str, Any]) -> Any:
        tools = sample.get("tools")
        if self._format in TURN_KEYS and sample.get("functions"):
            raise UserError("it has functions, OpenAI's old form; give them as tools")
        if is_text := isinstance(tools, str):
            tools = _parsed(tools, "its field 'tools'") if tools.strip() else None
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise UserError("its field 'tools' is not a list of JSON schemas")
        if not self._reads("tools"):
            raise UserError(
                "it has tools, which the tokenizer's chat template does not write; give a model whose template does, or remove them"
            )
        return tools if is_text else self._clean(tools)

    def _messages(self, sample: Mapping[str, Any]) -> Iterable[Message]:
        values = {field: sample.get(column) for field, column in self._columns.items()}
        for field, column in self._columns.items():
            if values[field] is None and field != "input":
                raise UserError(f"its field {column!r} is missing or null")
        if self._format in TURN_KEYS:
            (turns,) = values.values()
            return self._conversation(turns, *TURN_KEYS[self._format])
        if self._format == "prompt_completion":
            prompt, completion = values["prompt"], values["completion"]
            return [*self._turns(prompt, "user", is_prompt=True), *self._turns(completion, "assistant")]
        if self._format == "instruction":
            request = "\n".join(filter(None, (self._text(values, "instruction"), self._text(values, "input"))))
            answer = self._text(values, "output")
        else:
            request, answer = self._text(values, "question"), self._text(values, "answer")
        history = [text for pair in self._history(sample) for text in zip(("user", "assistant"), pair, strict=True)]
        return [self._message(role, text) for role, text in (*history, ("user", request), ("assistant", answer))]

    def _history(self, sample: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Earlier requests and answers, as in LLaMA-Factory."""
        history = sample.get("history") or []
        is_pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
        if not is_pairs or not all(isinstance(text, str) for pair in history for text in pair):
            raise UserError("its field 'history' is not a list of pairs of texts, a request and its answer")
        return history

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
                raise UserError(f"its turn {number} has the unknown role {turn[role_key]!r}; known: {', '.join(ROLES)}")
            messages.append(self._turn(turn, number, role, role_key, content_key, is_prompt))
        return messages

    def _turn(
        self, turn: Mapping[str, Any], number: int, role: str, role_key: str, content_key: str, is_prompt: bool
    ) -> Message:
        content = turn.get(content_key)
        fields = self._clean({key: turn[key] for key in turn if key not in (role_key, content_key)})
        if fields.get("function_call"):
            raise UserError(f"its turn {number} has function_call, OpenAI's old form; give it as tool_calls")
        # A template that writes calls does so in its own form.
        if turn[role_key] == "function_call" and self._reads("tool_calls"):
            content, fields["tool_calls"] = None, _calls(content, number)
        if fields.get("tool_calls"):
            if not self._reads("tool_calls"):
                raise UserError(
                    f"its turn {number} has tool_calls, which the tokenizer's chat template does not write; give a model whose template does, or "
                    f"write the call into {content_key!r}"
                )
            if not isinstance(fields["tool_calls"], list):
                raise UserError(f"its turn {number} has tool_calls that are no list")
            fields["tool_calls"] = [_call(call, number) for call in fields["tool_calls"]]
            if not content:
                # torchtune's message needs a text; templates tell null from an empty one, and get what the row has.
                content, fields["content"] = "", content
        elif "tool_calls" in fields:
            del fields["tool_calls"]
        is_learned = self._is_learned(fields, number, role)
        message = self._message(role, _content(content, number), is_prompt or not is_learned)
        return (
            ChatMessage(role=role, content=message.content, masked=message.masked, fields=fields) if fields else message
        )

    def _is_learned(self, fields: dict[str, Any], number: int, role: str) -> bool:
        """Whether the turn is learned, by what it says itself; the keys that say so leave ``fields``."""
        said = {key: fields.pop(key) for key in (*LEARNED, "masked") if fields.get(key) is not None}
        if fields.get("train_detail"):
            raise UserError(f"its turn {number} has train_detail; finch learns a turn or not: remove it, or set train")
        for key, value in said.items():
            if value not in (0, 1):
                raise UserError(
                    f"its turn {number} has {key} {value!r}; finch learns a turn or does not: set 0 or 1, false or true"
                )
        learned = [bool(value) != (key == "masked") for key, value in said.items()]
        if self._train_on_input and not all(learned):
            raise UserError(
                f"its turn {number} is not to be learned, but dataset.train_on_input=True learns all turns; remove one of the two"
            )
        # ``weight`` is not among these keys: OpenAI defines it for an assistant's turns only.
        if role != "assistant" and not self._train_on_input and _OF_ANY_ROLE & said.keys() and any(learned):
            raise UserError(
                f"its turn {number} is of role {role} and to be learned; finch learns the assistant's turns, or with dataset.train_on_input=True all"
            )
        return all(learned)

    def _message(self, role: str, content: Any, is_prompt: bool = False) -> Message:
        is_masked = (role != "assistant" or is_prompt) and not self._train_on_input
        return Message(role=role, content=content, masked=is_masked)


def _calls(content: Any, number: int) -> list[Any]:
    """The calls that a turn of ShareGPT has as JSON, one or a list."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UserError(f"its turn {number} is a function_call that is no JSON of a name and arguments; write it so")
    return [{"type": "function", "function": call} for call in calls]


def _call(call: Any, number: int) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"its turn {number} has a tool call that names no function")
    if "arguments" not in function and len(function) > 1:  # under another name, which no template reads
        raise UserError(f"its turn {number} has a tool call without arguments; rename its parameters, or give {{}}")
    return call


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{what} is not JSON ({error})") from error


def fields_read_by(tokenizer: Any) -> Callable[[str], bool]:
    """Whether a field of a turn, or ``tools``, reaches the tokenizer's chat template; torchtune's own tokenizers read none."""
    return getattr(tokenizer, "reads", None) or (lambda field: False)


def _read_beside(format: str) -> tuple[str, ...]:
    """The columns that are read beside those of a format's fields."""
    history = ("history",) if format in ("instruction", "question_answer") else ()
    return () if format == "text" else (*SYSTEM, "tools", *history)


def unused_fields(row: Mapping[str, Any], row_format: RowFormat, tokenizer: Any = None) -> list[str]:
    """The fields of a row that training does not see, those of turns as ``messages[].name``; null ones are none."""
    known, reads = {*row_format.columns.values(), *_read_beside(row_format.format)}, fields_read_by(tokenizer)
    found = dict.fromkeys(name for name, value in row.items() if name not in known and value is not None)
    keys = {*TURN_KEYS.get(row_format.format, TURN_KEYS["messages"]), *LEARNED, "masked", "tool_calls"}
    for column in row_format.columns.values():
        turns = row.get(column)
        for turn in turns if isinstance(turns, list) else ():
            if not isinstance(turn, dict) or turn.keys() <= keys:
                continue
            names = (name for name, value in turn.items() if name not in keys and value is not None and not reads(name))
            found |= dict.fromkeys(f"{column}[].{name}" for name in names)
    return list(found)


def check_turns(messages: list[Message]) -> None:
    """Checks the order of turns: an optional system turn, then user and assistant in turns; tool turns follow an assistant's.

    Raises UserError that names what is wrong, and at which turn.
    """
    if all(message.role != "assistant" for message in messages):
        raise UserError("its conversation has no assistant turn")
    allowed = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "ipython": ("assistant", "ipython")}
    allowed["assistant"] = ("user", "ipython")
    last = ""
    for number, message in enumerate(messages, start=1):
        if message.role not in allowed[last]:
            expected = " or ".join("tool" if role == "ipython" else role for role in allowed[last])
            remedy = "" if last else ": write a request before it, or remove that turn"
            raise UserError(f"its turn {number} is {message.role}'s, expected is {expected}{remedy}")
        last = message.role


def _content(value: Any, number: int) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(
            f"the content of its turn {number} is {'missing or null' if value is None else type(value).__name__}, not text"
        )
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"the content of its turn {number} has parts that are not text; finch trains only on text")
    return [{"type": "text", "content": part["text"]} for part in value]
