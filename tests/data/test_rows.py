"""Rows of every format: the same tokens and labels as torchtune's own datasets, and errors that name the row."""

import functools
import gzip
import json

import datasets
import pytest
from helpers import rows as rows_helper
from helpers.hub_server import hub_server
from helpers.rows import openai, sharegpt
from helpers.tokenizers import write_qwen3_tokenizer
from torchtune.datasets import chat_dataset, instruct_dataset, text_completion_dataset

from finch.base.errors import UserError
from finch.data.dataset import row_lengths
from finch.data.formats import detect
from finch.data.rows import load_from_hub, rows_dataset
from finch.data.stats import collect_stats
from finch.evaluation.datasets.sciknoweval import sciknoweval_dataset
from finch.models import auto_tokenizer

SYSTEM = "be the bird"
WORDS = [("the bird", "the tree"), ("a river", "a bird and a tree"), ("the tree", "a")]
ROWS = [{"question": one, "answer": two} for one, two in WORDS]


def conversation(question, answer):
    return ("user", question), ("assistant", answer), ("user", answer), ("assistant", question)


def rows_of(data):
    return [data[index] for index in range(len(data))]


def contents(data):
    return [(list(row["tokens"]), [int(label) for label in row["labels"]]) for row in rows_of(data)]


def targets_of(*samples):
    return [int(label) for sample in samples for label in sample["labels"] if label != -100]


@pytest.mark.parametrize("train_on_input", [False, True])
@pytest.mark.parametrize("system", [None, SYSTEM])
def test_rows_equal_torchtunes_instruct_rows(load, write, tokenizer, train_on_input, system):
    options = {"train_on_input": train_on_input, "new_system_prompt": system}
    columns = {"input": "question", "output": "answer"}
    reference = instruct_dataset(tokenizer, source="json", data_files=write(*ROWS), column_map=columns, **options)
    for names in (("question", "answer"), ("query", "response"), ("prompt", "completion"), ("instruction", "output")):
        data = load(*(dict(zip(names, words, strict=True)) for words in WORDS), **options)
        assert contents(data) == contents(reference), names


@pytest.mark.parametrize(
    ("style", "turns", "column", "format"),
    [("openai", openai, "messages", "messages"), ("sharegpt", sharegpt, "conversations", "sharegpt")],
)
@pytest.mark.parametrize("train_on_input", [False, True])
@pytest.mark.parametrize("system", [None, SYSTEM])
def test_rows_equal_torchtunes_chat_rows(load, write, tokenizer, style, turns, column, format, train_on_input, system):
    options = {"train_on_input": train_on_input, "new_system_prompt": system}
    file = write(*({"chat": turns(("system", "a tree"), *conversation(*words))} for words in WORDS))
    columns = {"conversation_column": "chat", "conversation_style": style}
    reference = chat_dataset(tokenizer, source="json", data_files=file, **columns, **options)
    data = load(data_files=file, column_map={column: "chat"}, format=format, **options)
    assert contents(data) == contents(reference)


def test_text_rows_equal_torchtunes(load, write, tokenizer):
    file = write(*({"text": f"{one} {two}"} for one, two in WORDS))
    data = load(data_files=file)
    assert contents(data) == contents(text_completion_dataset(tokenizer, source="json", data_files=file))


def test_prompt_of_messages_has_no_targets(load):
    turns = openai(*conversation("the bird", "a river"))
    split = load({"prompt": turns[:3], "completion": turns[3:]})[0]
    joint = load({"messages": turns})[0]
    assert split["tokens"] == joint["tokens"]
    targets = targets_of(split)
    assert targets == targets_of(joint)[-len(targets) :]
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
    first_answer = targets_of(load({"messages": openai(*turns[:2])})[0])
    assert targets_of(sample)[: len(first_answer)] == first_answer
    assert len(targets_of(sample)) < len(sample["tokens"])


def test_content_parts_are_joined(load):
    parts = [{"role": "user", "content": [{"type": "text", "text": "the bird"}]}, {"role": "assistant", "content": "a"}]
    assert contents(load({"messages": parts})) == contents(load({"question": "the bird", "answer": "a"}))


def test_csv_values_stay_text(load, write):
    file = write("question,answer,year", "the bird,1,2000", "a tree,None,2001", "a,2.50,", name="rows.csv")
    rows = load(data_files=file, source="csv").data._data
    assert rows["answer"] == ["1", "None", "2.50"]
    broken = load(data_files=write("question,answer", "a,b", "a,", name="rows.csv"), source="csv")
    with pytest.raises(
        UserError, match=r"row 2 of .*rows.csv cannot be used \(its field 'answer' is missing or null\)"
    ):
        broken[1]


@pytest.mark.parametrize("kind", ["json", "jsonl.gz", "parquet", "csv", "csv.gz"])
def test_kinds_of_files_have_the_same_rows(load, tmp_path, tokenizer, kind):
    rows = [{"question": f"{one}\n{two}", "answer": two} for one, two in WORDS]
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        texts = {
            "json": json.dumps(rows, indent=1),
            "jsonl": "\n".join(map(json.dumps, rows)),
            "csv": "question,answer\n" + "".join(f'"{row["question"]}",{row["answer"]}\n' for row in rows),
        }
        content = texts[kind.removesuffix(".gz")].encode()
        file.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    found = detect(str(file))
    assert (found.format, found.source, found.num_rows) == ("question_answer", kind.split(".")[0].rstrip("l"), 3)
    assert contents(rows_dataset(tokenizer, data_files=str(file))) == contents(load(*rows))


def test_several_files_and_patterns_are_one_dataset(load, write, tmp_path):
    files = [write(row, name=f"{number}.jsonl") for number, row in enumerate(ROWS)]
    pattern = str(tmp_path / "[0-9].jsonl")
    assert detect(pattern).num_rows == 3
    assert contents(load(data_files=files)) == contents(load(data_files=pattern)) == contents(load(*ROWS))


def test_parts_are_disjoint_complete_and_seeded(write, tokenizer):
    file = write(*({"question": f"a {number}", "answer": "b"} for number in range(60)))

    def rows(**arguments):
        return [row["question"] for row in rows_dataset(tokenizer, data_files=file, **arguments)._data]

    validation = rows(part="validation")
    assert sorted(rows(part="train") + validation) == sorted(rows())
    split = datasets.load_dataset("json", data_files=file, split="train").train_test_split(test_size=6, seed=0)
    assert validation == [
        question for question in rows() if question in split["test"]["question"]
    ]  # in the file's order
    assert rows(part="validation") == validation != rows(part="validation", split_seed=1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": openai(("user", "a"))}, "its conversation has no assistant turn"),
        ({"messages": openai(("user", "a"), ("robot", "b"))}, "its turn 2 has the unknown role 'robot'"),
        ({"messages": openai(("assistant", "a"))}, "its turn 1 is assistant's, expected is system or user"),
        (
            {"messages": openai(("user", "a"), ("user", "b"), ("assistant", "c"))},
            "its turn 2 is user's, expected is assi",
        ),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "content of its turn 1 is missing"),
        ({"messages": []}, "its conversation has no assistant turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are not text"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{"id": "1"}]}]}, "its turn 1 has tool_calls"),
        ({"messages": None}, "its field 'messages' is missing or null"),
    ],
)
def test_bad_conversations_name_the_row(load, row, message):
    samples = load({"messages": openai(("user", "a"), ("assistant", "b"))}, row)
    with pytest.raises(UserError, match=rf"dataset: row 2 of .* cannot be used \(.*{message}"):
        samples[1]


@pytest.mark.parametrize("train_on_input", [False, True])
def test_packed_rows_hold_all_targets(load, train_on_input):
    packed, plain = (load(*ROWS, packed=is_packed, train_on_input=train_on_input) for is_packed in (True, False))
    assert packed.packed
    assert len(packed) < len(plain)
    # Without a row's first token, which nothing predicts: in a pack the token before it is another row's.
    learned = [{"labels": sample["labels"][1:]} for sample in rows_of(plain)]
    assert targets_of(*({"labels": sample["labels"][1:]} for sample in rows_of(packed))) == targets_of(*learned)
    with pytest.raises(UserError, match=r"row 2 of .* \(its field 'answer' is missing or null\)"):
        load(ROWS[0], {"question": "a"}, packed=True)


def test_long_text_is_truncated_or_split_across_packs(load, tokenizer):
    text = "the bird and the tree " * 20
    tokens = tokenizer.encode(text)
    assert len(tokens) > 2 * tokenizer.max_seq_len
    assert load({"text": text})[0]["tokens"] == tokens[: tokenizer.max_seq_len]
    packs = rows_of(load({"text": "a"}, {"text": text}, {"text": "a"}, packed=True))
    assert targets_of(*packs) == tokenizer.encode("a") + tokens[1:] + tokenizer.encode("a")[1:]
    for pack in packs:  # each part's are those that it has alone: torchtune's wrap within a part
        positions = [place for length in row_lengths(pack) for place in range(length)]
        assert pack["input_pos"].tolist()[: len(positions)] == positions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "test"}, "part=test must be all, train or validation"),
        ({"split_by": "hash"}, "split_by=hash must be order or content"),
        ({"part": "train", "validation_fraction": 1.0}, "validation_fraction=1"),
        ({"part": "train", "split": "train[:1]"}, "too few"),
        ({"part": "train", "split_by": "content", "validation_fraction": 0.1}, "of 3 rows none is left"),
        ({"part": "test", "test_fraction": 0.5}, "test_fraction=0.5 needs dataset.split_by=content"),
    ],
)
def test_invalid_arguments_raise(load, arguments, message):
    with pytest.raises(UserError, match=message):
        load(*ROWS, **arguments)


def test_source_is_needed(tokenizer):
    with pytest.raises(UserError, match="needs data_files, the path of the rows, or source"):
        rows_dataset(tokenizer)
    with pytest.raises(UserError, match="source=json needs data_files"):
        rows_dataset(tokenizer, source="json")
    tokenizer.max_seq_len = None
    with pytest.raises(UserError, match=r"packed=True needs tokenizer.max_seq_len"):
        rows_dataset(tokenizer, packed=True, data_files="x.jsonl")


def test_arguments_without_an_effect_are_said(load, caplog):
    with pytest.raises(UserError, match=r"dataset\.new_system_prompt needs conversations, and the rows are plain text"):
        load({"text": "a"}, new_system_prompt="be the bird")
    load(*ROWS, validation_fraction=0.5)
    assert "dataset.part=all holds nothing out: dataset.validation_fraction=0.5" in caplog.text


def test_rows_may_have_unequal_fields(load, write):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b", "input": "c", "id": 10**25}]
    files = [write(row, name=f"{number}.jsonl") for number, row in enumerate(rows)]
    assert contents(load(data_files=files)) == contents(load({**rows[0], "input": ""}, rows[1]))


@pytest.fixture
def chat_tokenizer(tmp_path):
    write_qwen3_tokenizer(tmp_path, ["the bird and the tree"])
    return auto_tokenizer(str(tmp_path), max_seq_len=24)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", ["chat", "text", "converted"])
def test_rows_tokenized_at_once_are_those_tokenized_one_by_one(write, chat_tokenizer, format, packed):
    kinds = {"chat": openai(*conversation("the bird", "a tree")), "text": "the bird and the tree " * 9}
    if format == "converted":
        rows = [
            {"question": "a", "choices": {"text": [word], "label": ["A"]}, "answerKey": "A", "answer": ""}
            for word in "abc"
        ]
        file, build = write(*rows), functools.partial(sciknoweval_dataset, domain=None, level=None, part="all")
    else:
        file = write(*({"messages" if format == "chat" else "text": kinds[format]} for _ in range(3)))
        build = rows_dataset
    data = build(chat_tokenizer, data_files=file, packed=packed)
    reference = build(chat_tokenizer, data_files=file)
    if packed:
        assert targets_of(*rows_of(data)) == targets_of(*rows_of(reference)) or format == "text"
        return
    data.tokenize("dataset")
    assert data.tokenized is not None
    assert contents(data) == contents(reference)
    assert format != "converted" or not data.tokenized.unused()


def test_a_row_that_breaks_its_batch_is_named(write, chat_tokenizer):
    rows = [{"messages": openai(("user", "a"), ("assistant", "b"))}, {"messages": [{"role": ["x"], "content": "a"}]}]
    samples = rows_helper.load(chat_tokenizer, write(*rows, rows[0]), format="messages")
    stats = collect_stats(samples, 0, 1)
    assert stats.num_rows == 2
    [(reason, bad)] = stats.bad.items()
    assert reason.startswith("TypeError: unhashable")
    assert [row.number for row in bad.first] == [2]


def test_data_set_of_the_hub_is_of_the_named_commit(monkeypatch, tmp_path):
    one = b'{"text": "a"}\n'
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        old = server.add("datasets/Acme/Rows", {"train.jsonl": one})
        new = server.add("datasets/Acme/Rows", {"train.jsonl": 2 * one})
        lengths = [len(load_from_hub(f"Acme/Rows{end}", None, split="train")) for end in (f"@{old}", "", f"@{new}")]
        assert lengths == [1, 2, 2]
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        assert len(load_from_hub(f"Acme/Rows@{new}", None, split="train")) == 2
        # The library takes the newest of its cache.
        with pytest.raises(UserError, match=rf"^dataset.source=Acme/Rows@{old}: the cache has another commit"):
            load_from_hub(f"Acme/Rows@{old}", None, split="train")
        with pytest.raises(UserError, match=r"^dataset: .*Acme/Others"):
            load_from_hub("Acme/Others", None, split="train")
