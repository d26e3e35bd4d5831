"""Prompts to which the pretrained model's own answers are measured or replayed, rendered as training renders them."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtune.data import Message
from torchtune.datasets._sft import SFTTransform

from finch.base.errors import UserError
from finch.data.formats import TURN_KEYS, RowFormat, RowToMessages, detect_columns
from finch.data.row_files import local_files, utf8
from finch.data.rows import files_and_source, load_table
from finch.objectives import IGNORE_INDEX
from finch.objectives.replay import around_content

Sample = dict[str, Any]
"""``tokens`` and ``labels``, lists of equal length; a label that is no target is -100."""
PROMPT_COLUMNS = ("question", "query", "prompt", "instruction")
"""Of rows that may have no answer."""


@dataclass(frozen=True)
class Prompts:
    """Tokenized prompts. With ``after`` the model first writes a user's turn after each, and ``after`` follows it."""

    tokens: list[list[int]]
    after: list[int] | None = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr([self.tokens, self.after]).encode()).hexdigest()[:16]


def num_targets(sample: Sample) -> int:
    """Target tokens; the first token has nothing that predicts it."""
    return sum(label != IGNORE_INDEX for label in sample["labels"][1:])


def load_rows(
    data_files: str | Iterable[str] | None, source: str | None, name: str | None, split: str, number: int
) -> list[dict[str, Any]]:
    """The first ``number`` rows of a split, or prompts of a text file, one per line. Raises UserError for files that cannot be read."""
    names = None if data_files is None else [data_files] if isinstance(data_files, str) else list(map(str, data_files))
    if names is not None and all(Path(name).suffix == ".txt" for name in names):
        texts = (utf8(file.read_bytes().removeprefix(codecs.BOM_UTF8), file) for file in local_files(names))
        return _lines("\n".join(texts))[:number]
    files, reader = files_and_source(source, names)
    try:
        table = load_table(reader, names, files, name=name, split=split)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"dataset: {' '.join(str(error).split())[:200]}") from error
    if not len(table):
        raise UserError("dataset is empty: the split has no rows; give another file or split")
    return [table[index] for index in range(min(number, len(table)))]


def _lines(text: str) -> list[dict[str, Any]]:
    return [{"prompt": line.strip()} for line in text.split("\n") if line.strip()]


def tokenize_prompts(
    key: str,
    where: str,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    limit: int | None,
    max_new_tokens: int,
    format: str = "auto",
    column_map: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Each row's tokens up to where the assistant's answer starts.

    ``key``, ``where``: the config key and the rows' file, for messages. ``limit``: tokens of the context; None: no limit.

    Raises UserError for a row without a prompt, or one whose prompt and answer do not fit into the context.
    """
    prompts = []
    for number, row in enumerate(rows, start=1):
        name = f"{key}: row {number} of {where}"
        try:
            prompt = _prompt(**prompt_turns(row, tokenizer, format, column_map), tokenizer=tokenizer)
        except Exception as error:  # a row can break any library's tokenizer
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{name} cannot be used ({reason}); fix or remove that row") from error
        check_context(name, len(prompt), max_new_tokens, limit, "remove that row")
        prompts.append(prompt)
    return prompts


def check_context(name: str, length: int, max_new_tokens: int, limit: int | None, remedy: str) -> None:
    """Raises UserError if a prompt and its answer do not fit. A tokenizer with max_seq_len has cut a prompt of that length."""
    if limit is not None and (length >= limit or length + max_new_tokens > limit):
        raise UserError(
            f"{name} has {length} tokens and its answer of up to {max_new_tokens}, the context has {limit}; {remedy}, or raise "
            "tokenizer.max_seq_len where the model allows it"
        )


def context_limit(max_seq_len: int | None, tokenizer: Any) -> int | None:
    """The longest row in tokens, of a model that takes ``max_seq_len`` and of the tokenizer's max_seq_len; None: no limit. Raises UserError if
    the tokenizer's is no number: torchtune's tokenizers take anything."""
    own = getattr(tokenizer, "max_seq_len", None)
    if own is not None and (isinstance(own, bool) or not isinstance(own, int) or own < 1):
        raise UserError(f"tokenizer.max_seq_len={own} must be a number of tokens of at least 1, or null")
    limits = (max_seq_len, own)
    return min((limit for limit in limits if limit is not None), default=None)


def stop_tokens(tokenizer: Any) -> list[int]:
    """The tokens that end an answer."""
    return list(getattr(tokenizer, "stop_tokens", None) or [tokenizer.eos_id])


def own_prompts(tokenizer: Any, number: int) -> Prompts:
    """Prompts that the model writes itself: user turns after its template's beginning (Magpie, arXiv 2406.08464), or where the template marks
    no turn's end by a special token, nothing but BOS."""
    before, after = around_user_turn(tokenizer)
    special = set(getattr(tokenizer, "special_tokens", {}).values())
    # Without a special token that ends the turn, nothing would show where the model has finished writing it.
    if after and after[0] in special:
        return Prompts([before] * number, after)
    return Prompts([[tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]] * number)


def around_user_turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens before a user turn's content, and those between it and the assistant's answer: what prompts of other contents share."""
    # Two texts with no letter in common: what their prompts share is the template's.
    one, other = (user_prompt(text, tokenizer) for text in ("7", "z"))
    return around_content(one, other)


def user_prompt(text: str, tokenizer: Any, before: Sequence[str] = ()) -> list[int]:
    """The tokens before the assistant's answer to a user turn. ``before``: the turns before it, the user's and the assistant's."""
    roles = ("user", "assistant")
    turns = [Message(role=roles[i % 2], content=each, masked=True) for i, each in enumerate((*before, text))]
    return _prompt(turns, tokenizer)


def _prompt(turns: list[Message], tokenizer: Any, **tools: Any) -> list[int]:
    """What comes before an assistant's answer to ``turns``."""
    # With an answer, as rows are rendered: what comes before its first target is what a row teaches to answer.
    messages = [*turns, Message(role="assistant", content=".")]
    sample = plain(SFTTransform(model_transform=tokenizer)({"messages": messages, **tools}))
    is_target = [label != IGNORE_INDEX for label in sample["labels"]]
    return sample["tokens"][: is_target.index(True) if any(is_target) else None]


def prompt_turns(
    row: Mapping[str, Any], tokenizer: Any, format: str = "auto", column_map: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """``turns``, messages that are no targets: those before a conversation's first answer, or all of one that ends with a user's turn; of other rows
    those before their own answer, history included; and ``tools``, if the row has some."""
    present = {name: value for name, value in row.items() if value is not None}
    named, has_turns = (column_map or {}).get("prompt"), {"messages", "conversations"} & present.keys()
    # Of a conversation the turns count, its system prompt included, and not a column that repeats the first one.
    for column in filter(None, (named, *(() if has_turns else PROMPT_COLUMNS))):
        has_input = column == "instruction" and (row.get("input") or row.get("context"))
        if isinstance(row.get(column), str) and not has_input:
            # Rows of prompts have no answers; what else a row has is read as that of a row with one.
            row_format = RowFormat("question_answer", {"question": column, "answer": ""})
            present[""] = "."
            break
    else:
        row_format = detect_columns(present, present, format, column_map)
    if row_format.format == "text":
        raise UserError(
            f"it has the fields {', '.join(row)} and no prompt; kind self needs question, prompt or a conversation"
        )
    sample = RowToMessages(row_format, tokenizer=tokenizer)(present)
    messages = sample.pop("messages")
    is_chat, is_completion = row_format.format in TURN_KEYS, row_format.format == "prompt_completion"
    answers = [n for n, each in enumerate(messages) if each.role == "assistant" and (is_chat or not each.masked)]
    # Of rows that are no turns the last answer is their own, since earlier ones are their history.
    answer = answers[0 if is_chat or is_completion else -1]
    turns = messages if messages[-1].role == "user" else messages[:answer]
    for turn in turns:
        turn.masked = True
    return {"turns": turns, **sample}


def plain(sample: Mapping[str, Any]) -> Sample:
    """A tokenized row with lists in place of tensors."""
    return {key: torch.as_tensor(sample[key]).tolist() for key in ("tokens", "labels")}
