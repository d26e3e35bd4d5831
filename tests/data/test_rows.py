"""Rows of every format: the same tokens and labels as torchtune's own datasets, and errors that name the row."""

import gzip
import json

import datasets
import pytest
from helpers import rows as rows_helper
from helpers.rows import openai, sharegpt, write_lines
from helpers.runs import make_config, write_rows
from omegaconf import OmegaConf
from torchtune.config import instantiate
from torchtune.datasets import chat_dataset, instruct_dataset, text_completion_dataset

from finch.data.rows import rows_dataset
from finch.errors import UserError

SYSTEM = "be the bird"
WORDS = [("the bird", "the tree"), ("a river", "a bird and a tree"), ("the tree", "a")]


@pytest.fixture
def tokenizer(base_folder, rows_file, tmp_path):
    return instantiate(OmegaConf.create(make_config(base_folder, rows_file, tmp_path)).tokenizer)


@pytest.fixture
def write(tmp_path):
    return lambda *rows, name="rows.jsonl": write_lines(tmp_path / name, *rows)


@pytest.fixture
def load(write, tokenizer):
    """Loads rows as the recipe does."""
    return lambda *rows, **arguments: rows_helper.load(
        tokenizer, **{"data_files": write(*rows) if rows else None, **arguments}
    )


def conversation(question, answer):
    return ("user", question), ("assistant", answer), ("user", answer), ("assistant", question)


def rows_of(data):
    return [data[index] for index in range(len(data))]


def contents(data):
    return [(list(row["tokens"]), [int(label) for label in row["labels"]]) for row in rows_of(data)]


@pytest.mark.parametrize("train_on_input", [False, True])
@pytest.mark.parametrize("system", [None, SYSTEM])
def test_rows_equal_torchtunes_instruct_rows(load, write, tokenizer, train_on_input, system):
    options = {"train_on_input": train_on_input, "new_system_prompt": system}
    file = write(*({"question": one, "answer": two} for one, two in WORDS))
    reference = instruct_dataset(
        tokenizer, source="json", data_files=file, column_map={"input": "question", "output": "answer"}, **options
    )
    for names in (("question", "answer"), ("query", "response"), ("prompt", "completion"), ("instruction", "output")):
        data = load(*(dict(zip(names, words, strict=True)) for words in WORDS), **options)
        assert contents(data) == contents(reference), names


@pytest.mark.parametrize("style", ["openai", "sharegpt"])
@pytest.mark.parametrize("train_on_input", [False, True])
@pytest.mark.parametrize("system", [None, SYSTEM])
def test_rows_equal_torchtunes_chat_rows(load, write, tokenizer, style, train_on_input, system):
    options = {"train_on_input": train_on_input, "new_system_prompt": system}
    turns = openai if style == "openai" else sharegpt
    file = write(*({"chat": turns(("system", "a tree"), *conversation(*words))} for words in WORDS))
    reference = chat_dataset(
        tokenizer, source="json", data_files=file, conversation_column="chat", conversation_style=style, **options
    )
    column = "messages" if style == "openai" else "conversations"
    assert contents(
        load(
            data_files=file, column_map={column: "chat"}, format=column.replace("conversations", "sharegpt"), **options
        )
    ) == contents(reference)


def test_text_rows_equal_torchtunes(load, write, tokenizer):
    file = write(*({"text": f"{one} {two}"} for one, two in WORDS))
    data = load(data_files=file)
    assert contents(data) == contents(text_completion_dataset(tokenizer, source="json", data_files=file))
    assert data[0]["tokens"][0] == tokenizer.bos_id
    assert data[0]["tokens"][-1] == tokenizer.eos_id
    assert data[0]["tokens"] == data[0]["labels"]


def test_every_assistant_turn_is_a_target(load, tokenizer):
    sample = load({"messages": openai(*conversation("the bird", "a river"))})[0]
    targets = [label for label in sample["labels"] if label != -100]
    answers = [tokenizer.encode(text, add_bos=False, add_eos=False) for text in ("a river", "the bird")]
    assert targets == [*answers[0], tokenizer.eos_id, *answers[1], tokenizer.eos_id]


def test_prompt_of_messages_has_no_targets(load):
    turns = openai(*conversation("the bird", "a river"))
    split = load({"prompt": turns[:3], "completion": turns[3:]})[0]
    joint = load({"messages": turns})[0]
    assert split["tokens"] == joint["tokens"]
    targets = [label for label in split["labels"] if label != -100]
    assert targets == [label for label in joint["labels"] if label != -100][-len(targets) :]
    mixed = load({"prompt": turns[:3], "completion": turns[3]["content"]})[0]
    assert mixed["labels"] == split["labels"]


def test_instruction_and_input_are_one_turn_with_a_line_break(load):
    output = {"output": "a"}
    data = load({"instruction": "the", "input": "bird", **output}, {"instruction": "the", "input": "", **output})
    expected = load({"question": "the\nbird", "answer": "a"}, {"question": "the", "answer": "a"})
    assert contents(data) == contents(expected)


def test_tool_turns_are_no_targets(load):
    turns = (("user", "the bird"), ("assistant", "a"), ("tool", "tree"), ("assistant", "river"))
    sample = load({"messages": openai(*turns)})[0]
    observed = sharegpt(*turns[:1], ("function_call", "a"), ("observation", "tree"), *turns[3:])
    assert contents([sample]) == contents(load({"conversations": observed}))
    unmasked = [label for label in sample["labels"] if label != -100]
    masked = [label for label in load({"messages": openai(*turns[:2])})[0]["labels"] if label != -100]
    assert unmasked[: len(masked)] == masked
    assert len(unmasked) < len(sample["tokens"])


def test_content_parts_are_joined(load):
    parts = [{"role": "user", "content": [{"type": "text", "text": "the bird"}]}, {"role": "assistant", "content": "a"}]
    assert contents(load({"messages": parts})) == contents(load({"question": "the bird", "answer": "a"}))


def test_csv_values_stay_text(load, write):
    file = write("question,answer,year", "the bird,1,2000", "a tree,None,2001", "a,2.50,", name="rows.csv")
    rows = load(data_files=file, source="csv").data._data
    assert rows["answer"] == ["1", "None", "2.50"]
    broken = load(data_files=write("question,answer", "a,b", "a,", name="rows.csv"), source="csv")
    with pytest.raises(UserError, match=r"row 2 of .*rows.csv cannot be used \(it has no field 'answer'\)"):
        broken[1]


@pytest.mark.parametrize("kind", ["json", "jsonl.gz", "parquet", "csv"])
def test_kinds_of_files_have_the_same_rows(load, tmp_path, tokenizer, kind):
    rows = [{"question": one, "answer": two} for one, two in WORDS]
    table, file = datasets.Dataset.from_list(rows), str(tmp_path / f"rows.{kind}")
    if kind == "json":
        (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    elif kind == "jsonl.gz":
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        getattr(table, f"to_{kind}")(file)
    assert contents(rows_dataset(tokenizer, data_files=file)) == contents(load(*rows))


def test_several_files_are_one_dataset(load, write):
    files = [write({"question": one, "answer": two}, name=f"{one}.jsonl") for one, two in WORDS]
    rows = [{"question": one, "answer": two} for one, two in WORDS]
    assert contents(load(data_files=files)) == contents(load(*rows))


def test_hub_rows_are_loaded_by_name(monkeypatch, tokenizer):
    calls = []
    table = datasets.Dataset.from_list([{"query": one, "response": two} for one, two in WORDS])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or table)
    data = rows_dataset(tokenizer, source="org/rows", name="small", split="test")
    assert calls == [(("org/rows", "small"), {"split": "test", "data_files": None})]
    assert (len(data), data.row_format.format) == (3, "question_answer")


def test_parts_are_disjoint_complete_and_seeded(write, tokenizer, tmp_path):
    write_rows(tmp_path / "rows.jsonl", 60)
    file = str(tmp_path / "rows.jsonl")

    def rows(**arguments):
        return [tuple(row.values()) for row in rows_dataset(tokenizer, data_files=file, **arguments)._data]

    train, validation = rows(part="train"), rows(part="validation")
    assert len(validation) == 6
    assert sorted(train + validation) == sorted(rows())
    split = datasets.load_dataset("json", data_files=file, split="train").train_test_split(test_size=6, seed=0)
    assert validation == [tuple(row.values()) for row in split["test"]]
    assert rows(part="validation") == validation != rows(part="validation", split_seed=1)


@pytest.mark.parametrize("split_by", ["order", "content"])
def test_bad_row_of_a_part_has_the_files_number(load, write, split_by):
    file = write(*({"question": f"a {number}", "answer": "b" if number != 13 else None} for number in range(1, 21)))
    options = {"validation_fraction": 0.3, "split_by": split_by}
    samples = [load(data_files=file, part=part, **options) for part in ("train", "validation")]
    errors = []
    for part in samples:
        for index in range(len(part)):
            try:
                part[index]
            except UserError as error:
                errors.append(str(error))
    (error,) = errors
    assert f"dataset: row 13 of {file} cannot be used (it has no field 'answer'); fix or remove that row" in error


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": openai(("user", "a"))}, "its conversation has no assistant turn"),
        ({"messages": openai(("user", "a"), ("robot", "b"))}, "its turn 2 has the unknown role 'robot'"),
        ({"messages": openai(("assistant", "a"))}, "its turn 1 is assistant's, expected is system or user"),
        (
            {"messages": openai(("user", "a"), ("user", "b"), ("assistant", "c"))},
            "its turn 2 is user's, expected is assistant",
        ),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "content of its turn 1 is missing"),
        ({"messages": []}, "its conversation has no assistant turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are not text"),
        (
            {"messages": [*openai(("user", "a")), {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "its turn 2 has tool_calls",
        ),
        ({"messages": None}, "it has no field 'messages'"),
    ],
)
def test_bad_conversations_name_the_row(load, row, message):
    samples = load({"messages": openai(("user", "a"), ("assistant", "b"))}, row)
    with pytest.raises(UserError, match=rf"dataset: row 2 of .* cannot be used \(.*{message}"):
        samples[1]


def test_packed_rows_hold_all_tokens(load, tokenizer):
    rows = [{"question": one, "answer": two} for one, two in WORDS]
    packed, plain = load(*rows, packed=True), load(*rows)
    assert packed.packed
    expected = sum(label != -100 for sample in rows_of(plain) for label in sample["labels"])
    assert sum(int((sample["labels"] != -100).sum()) for sample in rows_of(packed)) == expected
    with pytest.raises(UserError, match=r"row 2 of .* has no field 'answer'"):
        load(rows[0], {"question": "a"}, packed=True)


def test_long_text_is_truncated_or_split_across_packs(load, tokenizer):
    text = "the bird and the tree " * 20
    tokens = tokenizer.encode(text)
    assert len(tokens) > 2 * tokenizer.max_seq_len
    assert load({"text": text})[0]["tokens"] == tokens[: tokenizer.max_seq_len]
    packs = rows_of(load({"text": text}, {"text": "a"}, packed=True))
    assert [int(label) for pack in packs for label in pack["labels"] if label != -100] == tokens + tokenizer.encode("a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "test"}, "part=test must be all, train or validation"),
        ({"part": "train", "validation_fraction": 1.0}, "validation_fraction=1"),
        ({"part": "train", "split": "train[:1]"}, "too few"),
        ({"part": "train", "split_by": "content", "validation_fraction": 0.1}, "of 3 rows none is left"),
        ({"part": "test", "test_fraction": 0.5}, "test_fraction=0.5 needs dataset.split_by=content"),
    ],
)
def test_invalid_arguments_raise(load, arguments, message):
    rows = [{"question": one, "answer": two} for one, two in WORDS]
    with pytest.raises(UserError, match=message):
        load(*rows, **arguments)


def test_source_is_needed(tokenizer):
    with pytest.raises(UserError, match="needs data_files, the path of the rows, or source"):
        rows_dataset(tokenizer)
    with pytest.raises(UserError, match="source=json needs data_files"):
        rows_dataset(tokenizer, source="json")
    tokenizer.max_seq_len = None
    with pytest.raises(UserError, match=r"packed=True needs tokenizer.max_seq_len"):
        rows_dataset(tokenizer, packed=True, data_files="x.jsonl")


def test_rows_of_unequal_fields_say_so(load, write):
    files = [write({"instruction": "a", "output": "b"}, name="one.jsonl")]
    files.append(write({"instruction": "a", "output": "b", "input": "c"}, name="two.jsonl"))
    with pytest.raises(UserError, match=r"two.jsonl: row 1 has the field 'input', unlike the rows before it"):
        load(data_files=files)
