"""What is wrong with a dataset's files, columns or style, in one line."""

import datasets
import pytest
from helpers.rows import dataset_config, load, openai, sharegpt, write_lines
from helpers.runs import make_config
from omegaconf import OmegaConf
from torchtune.config import instantiate

from finch.data.dataset import Row, load_dataset, load_unpacked
from finch.errors import UserError

INSTRUCT = "torchtune.datasets.instruct_dataset"
CHAT = "torchtune.datasets.chat_dataset"
QA = {"question": "a", "answer": "b"}
TURNS = ("user", "a"), ("assistant", "b")


@pytest.fixture
def tokenizer(base_folder, rows_file, tmp_path):
    return instantiate(OmegaConf.create(make_config(base_folder, rows_file, tmp_path)).tokenizer)


@pytest.mark.parametrize(
    ("row", "arguments", "looks"),
    [
        (
            {"prompt": "a", "completion": "b"},
            {"column_map": {"input": "question", "output": "answer"}},
            "prompt/completion",
        ),
        (
            {"messages": openai(*TURNS)},
            {"column_map": {"input": "question", "output": "answer"}},
            "messages (role/content)",
        ),
        (
            {"conversations": sharegpt(*TURNS)},
            {"_component_": CHAT, "conversation_column": "conversations", "conversation_style": "openai"},
            "ShareGPT conversations (from/value)",
        ),
        (
            {"messages": openai(*TURNS)},
            {"_component_": CHAT, "conversation_column": "messages", "conversation_style": "sharegpt"},
            "messages (role/content)",
        ),
        (
            QA,
            {"_component_": CHAT, "conversation_column": "messages", "conversation_style": "openai"},
            "question/answer",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_another_style_are_named(tokenizer, tmp_path, row, arguments, looks, packed):
    file = write_lines(tmp_path / "rows.jsonl", row)
    with pytest.raises(UserError) as raised:
        load(tokenizer, file, **{"_component_": INSTRUCT, "packed": packed, **arguments})
    message = str(raised.value)
    assert f"its rows look like {looks}: correct the columns or the style, or set dataset._component_=finch" in message
    assert "\n" not in message


@pytest.mark.parametrize("component", [INSTRUCT, "finch.data.rows.rows_dataset"])
@pytest.mark.parametrize(
    ("name", "source"), [("rows.jsonl", "json"), ("rows.csv", "csv"), ("absent.parquet", "parquet")]
)
def test_path_given_as_source_names_the_remedy(tokenizer, tmp_path, component, name, source):
    if name != "absent.parquet":
        write_lines(tmp_path / name, "x")
    config = OmegaConf.create({"dataset": {"_component_": component, "source": f"{tmp_path}/{name}"}})
    with pytest.raises(UserError) as raised:
        load_dataset(config, "dataset", tokenizer)
    remedy = f"is a file; set dataset.source={source} dataset.data_files={tmp_path}/{name}"
    assert str(raised.value) == f"dataset.source={tmp_path}/{name} {remedy}"


@pytest.mark.parametrize("component", [INSTRUCT, "finch.data.rows.rows_dataset"])
def test_bad_files_are_named(tokenizer, tmp_path, component):
    empty = write_lines(tmp_path / "empty.jsonl")
    for file, message in (
        (tmp_path / "absent.jsonl", r"^dataset.data_files=.*absent.jsonl does not exist; correct the path"),
        (tmp_path, r"^dataset.data_files=.* is a directory; name its files, such as .*/\*.jsonl"),
        (empty, r"^dataset is empty: .*empty.jsonl has no rows"),
    ):
        with pytest.raises(UserError, match=message):
            load(tokenizer, str(file), _component_=component)


def test_default_columns_need_no_image(tokenizer, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", {"input": "a", "output": "b"})
    assert len(load(tokenizer, file, _component_=INSTRUCT)) == 1


def test_streaming_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"dataset.streaming=True is not supported: the order of an epoch"):
        load(tokenizer, write_lines(tmp_path / "rows.jsonl", QA), _component_=INSTRUCT, streaming=True)


def test_row_of_several_files_and_datasets_is_named(tokenizer, tmp_path):
    files = [write_lines(tmp_path / f"{number}.jsonl", *[QA] * number) for number in (1, 2, 3)]
    assert load(tokenizer, files).row(4) == Row(4, 2, files[2])
    one, two = (dataset_config(data_files).dataset for data_files in (files[:2], files[2]))
    samples = load_dataset(OmegaConf.create({"dataset": [one, two]}), "dataset", tokenizer)
    assert [samples.row(index).source for index in range(6)] == [files[0], *[files[1]] * 2, *[files[2]] * 3]
    assert [samples.row(index).number for index in range(6)] == [1, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("component", [INSTRUCT, "finch.data.rows.rows_dataset"])
def test_load_unpacked_keeps_bad_rows(tokenizer, tmp_path, component):
    columns = {"column_map": {"input": "question", "output": "answer"}}
    file = write_lines(tmp_path / "rows.jsonl", QA, {"question": "a"}, QA)
    config = dataset_config(file, _component_=component, packed=True, **columns)
    if datasets.__version__.startswith("4.7."):  # it cannot read a file in which a row lacks a field
        with pytest.raises(UserError, match=r"dataset: row 2 of .*rows.jsonl has no field 'answer'; fix"):
            load_unpacked(config, "dataset", tokenizer)
        return
    samples = load_unpacked(config, "dataset", tokenizer)
    assert len(samples) == 3
    with pytest.raises(UserError, match=r"dataset: row 2 of .*rows.jsonl cannot be used \(it has no field 'answer'\)"):
        samples[1]
