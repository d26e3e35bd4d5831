import pytest
from helpers.rows import membership
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "test"}, "part=test"),
        ({"source": "json", "data_files": None}, "needs data_files"),
        ({"split_by": "hash"}, "split_by=hash must be order or content"),
    ],
)
def test_tofu_invalid_arguments_raise(tokenizer, rows, arguments, message):
    with pytest.raises(UserError, match=message):
        tofu_dataset(tokenizer, **{"data_files": rows, **arguments})
