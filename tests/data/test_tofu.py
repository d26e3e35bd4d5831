import pytest
from helpers.rows import membership, write_lines
from helpers.runs import make_config, write_rows
from omegaconf import OmegaConf
from torchtune.config import instantiate

from finch.data.tofu import tofu_dataset
from finch.errors import UserError


@pytest.fixture
def tokenizer(base_folder, rows_file, tmp_path):
    return instantiate(OmegaConf.create(make_config(base_folder, rows_file, tmp_path)).tokenizer)


@pytest.fixture
def rows(tmp_path):
    write_rows(tmp_path / "rows.jsonl", 60)
    return str(tmp_path / "rows.jsonl")


def contents(data):
    return [(row["question"], row["answer"]) for row in data._data]


def test_tofu_parts_are_disjoint_and_complete(tokenizer, rows):
    train, validation = (tofu_dataset(tokenizer, data_files=rows, part=part) for part in ("train", "validation"))
    assert (len(train), len(validation)) == (54, 6)
    whole = [tuple(row.values()) for row in tofu_dataset(tokenizer, data_files=rows)._data] + contents(validation)
    assert sorted(contents(train) + contents(validation)) == sorted(whole)


def test_tofu_split_depends_on_its_seed(tokenizer, rows):
    first, again, other = (contents(tofu_dataset(tokenizer, data_files=rows, split_seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert sorted(first) != sorted(other)


def test_tofu_split_by_content_ignores_the_order(tokenizer, tmp_path):
    rows = [{"question": f"the bird {number}", "answer": "a tree"} for number in range(60)]
    files = [write_lines(tmp_path / "rows.jsonl", *rows), write_lines(tmp_path / "turned.jsonl", *rows[::-1])]
    for part, size in (("train", 54), ("validation", 6)):
        data = [tofu_dataset(tokenizer, data_files=file, part=part, split_by="content") for file in files]
        assert contents(data[0]) == contents(data[1])
        assert len(data[0]) == size


def test_tofu_membership_is_pinned(tokenizer, shared_data):
    file = str(shared_data / "tofu" / "full.jsonl")
    pinned = {
        ("order", "train"): (3600, "3168f16d4e0842fa"),
        ("order", "validation"): (400, "fe3ad12acdccfd77"),
        ("content", "train"): (3600, "2cb9dafc36391ab1"),
        ("content", "validation"): (400, "c52a57ad999ed4d7"),
    }
    for split_by, part in pinned:
        data = tofu_dataset(tokenizer, data_files=file, part=part, split_by=split_by)
        assert (len(data), membership(question for question, _ in contents(data))) == pinned[split_by, part]


def test_tofu_rows_equal_torchtunes_instruct_rows(tokenizer, rows):
    from torchtune.datasets import instruct_dataset

    train = tofu_dataset(tokenizer, data_files=rows)
    reference = instruct_dataset(
        tokenizer, source="json", data_files=rows, column_map={"input": "question", "output": "answer"}
    )
    found = {tuple(train[index]["tokens"]) for index in range(len(train))}
    assert found <= {tuple(reference[index]["tokens"]) for index in range(60)}


def test_tofu_packed(tokenizer, rows):
    packed = tofu_dataset(tokenizer, data_files=rows, packed=True)
    assert len(packed) < 54
    assert len(packed[0]["tokens"]) == tokenizer.max_seq_len


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "test"}, "part=test"),
        ({"source": "json", "data_files": None}, "needs data_files"),
        ({"validation_fraction": 1.0}, "validation_fraction=1"),
        ({"split_by": "hash"}, "split_by=hash must be order or content"),
        ({"split": "train[:1]"}, "too few"),
    ],
)
def test_tofu_invalid_arguments_raise(tokenizer, rows, arguments, message):
    with pytest.raises(UserError, match=message):
        tofu_dataset(tokenizer, **{"data_files": rows, **arguments})
