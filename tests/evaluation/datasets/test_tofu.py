import pytest
from helpers.rows import membership

from finch.evaluation.datasets.tofu import tofu_dataset

PINNED = {
    ("order", "train"): (3600, "3168f16d4e0842fa"),
    ("order", "validation"): (400, "fe3ad12acdccfd77"),
    ("content", "train"): (3600, "2cb9dafc36391ab1"),
    ("content", "validation"): (400, "c52a57ad999ed4d7"),
}


@pytest.mark.parametrize(("split_by", "part"), PINNED)
def test_tofu_membership_is_pinned(tokenizer, shared_data, split_by, part):
    file = str(shared_data / "tofu" / "full.jsonl")
    questions = tofu_dataset(tokenizer, data_files=file, part=part, split_by=split_by)._data["question"]
    assert (len(questions), membership(questions)) == PINNED[split_by, part]
