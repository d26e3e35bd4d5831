"""What is wrong with a dataset's files, columns or style, in one line."""

import pytest
from helpers.rows import ROWS, dataset_config, openai, sharegpt
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.data.dataset import Row, load_dataset

INSTRUCT = "torchtune.datasets.instruct_dataset"
COLUMNS = {"column_map": {"input": "question", "output": "answer"}}
QA = {"question": "a", "answer": "b"}
TURNS = ("user", "a"), ("assistant", "b")
MESSAGES, SHAREGPT = {"messages": openai(*TURNS)}, {"conversations": sharegpt(*TURNS)}


def chat(column, style):
    component = "torchtune.datasets.chat_dataset"
    return {"_component_": component, "conversation_column": column, "conversation_style": style}


@pytest.mark.parametrize(
    ("row", "arguments", "looks"),
    [
        ({"prompt": "a", "completion": "b"}, COLUMNS, "prompt/completion"),
        (SHAREGPT, chat("conversations", "openai"), "ShareGPT conversations (from/value)"),
        (MESSAGES, chat("messages", "sharegpt"), "messages (role/content)"),
        (QA, chat("messages", "openai"), "question/answer"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_another_style_are_named(load, row, arguments, looks, packed):
    with pytest.raises(UserError) as raised:
        load(row, **{"_component_": INSTRUCT, "packed": packed, **arguments})
    message = str(raised.value)
    assert f"its rows look like {looks}: correct the columns or the style, or set dataset._component_=finch" in message
    assert "\n" not in message


@pytest.mark.parametrize("component", [INSTRUCT, ROWS])
@pytest.mark.parametrize("name", ["rows.jsonl", "absent.parquet"])
def test_path_given_as_source_names_the_remedy(tokenizer, write, tmp_path, component, name):
    write("x")
    file, source = f"{tmp_path}/{name}", "json" if name == "rows.jsonl" else "parquet"
    config = OmegaConf.create({"dataset": {"_component_": component, "source": file}})
    with pytest.raises(UserError) as raised:
        load_dataset(config, "dataset", tokenizer)
    remedy = f"is a file; set dataset.source={source} dataset.data_files={file}"
    assert str(raised.value) == f"dataset.source={file} {remedy}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", r"^dataset.data_files=.*absent.jsonl does not exist; correct the path"),
        ("", r"^dataset.data_files=.* is a directory; name its files, such as .*/\*.jsonl"),
        ("empty.jsonl", r"^dataset is empty: .*empty.jsonl has no rows"),
    ],
)
def test_bad_files_are_named(load, write, tmp_path, name, message):
    write(name="empty.jsonl")
    with pytest.raises(UserError, match=message):
        load(data_files=str(tmp_path / name), _component_=INSTRUCT)


def test_default_columns_need_no_image(load):
    assert len(load({"input": "a", "output": "b"}, _component_=INSTRUCT)) == 1


def test_streaming_is_refused(load):
    with pytest.raises(UserError, match=r"dataset.streaming=True is not supported: the order of an epoch"):
        load(QA, _component_=INSTRUCT, streaming=True)


def test_row_of_several_files_and_datasets_is_named(tokenizer, write, load):
    files = [write(*[QA] * number, name=f"{number}.jsonl") for number in (1, 2, 3)]
    assert load(data_files=files).row(4) == Row(4, 2, files[2])
    one, two = (dataset_config(data_files).dataset for data_files in (files[:2], files[2]))
    samples = load_dataset(OmegaConf.create({"dataset": [one, two]}), "dataset", tokenizer)
    numbered = [(files[0], 1), (files[1], 1), (files[1], 2), (files[2], 1), (files[2], 2), (files[2], 3)]
    assert [(samples.row(index).source, samples.row(index).number) for index in range(6)] == numbered
