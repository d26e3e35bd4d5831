"""``weight`` beside a dataset's component: read, checked, overridden, and refused where it has no meaning."""

import re

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.config.dataset_weights import dataset_weights, without_weight
from finch.config.parser import merge
from finch.config.schema import FULL_FINETUNE
from finch.config.validation import check
from finch.errors import UserError

ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}


def checked(dataset, **changes):
    return check(OmegaConf.create({**MINIMAL, "dataset": dataset, **changes}), FULL_FINETUNE)


def test_weights_of_a_list_and_of_none():
    weighted = [{**ALPACA, "weight": 19}, {**ALPACA, "weight": "${general}", "split": "train"}]
    cfg = checked(weighted, general=1)
    assert dataset_weights(cfg.dataset) == [19.0, 1.0]
    assert without_weight(cfg.dataset[1]) == {**ALPACA, "split": "train"}
    assert dataset_weights(checked(ALPACA).dataset) is None
    assert dataset_weights(checked([ALPACA, ALPACA]).dataset) is None


@pytest.mark.parametrize("weight", [0, 0.0, -0.5, ".nan", float("nan"), float("inf"), True, "x", [1], {}])
def test_weight_must_be_a_number_above_0(weight):
    with pytest.raises(UserError, match=r"^dataset\[1\]\.weight=.* must be a number above 0"):
        checked([{**ALPACA, "weight": 1}, {**ALPACA, "weight": weight}])


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ({**ALPACA, "weight": 1}, {}, "unknown key dataset.weight; weights belong to the entries of a list"),
        ([{**ALPACA, "weight": 1}], {}, "dataset[0].weight=1: dataset has one entry"),
        ([ALPACA, {**ALPACA, "weight": 1}], {}, "dataset[0] has no weight, but dataset[1].weight=1"),
        (ALPACA, {"dataset_validation": [{**ALPACA, "weight": 1}] * 2}, "only the entries of dataset have weights"),
        (ALPACA, {"dataset_validation": {**ALPACA, "weight": 1}}, "only the entries of dataset have weights"),
    ],
)
def test_weight_elsewhere_is_refused(dataset, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        checked(dataset, **changes)


def test_command_line_overrides_entries_of_a_list():
    blocks = {"dataset": [{**ALPACA, "weight": 1}, {**ALPACA, "weight": 2}], "epochs": 1}
    cfg, _ = merge(blocks, ["dataset[1].weight=0.5", "epochs=2", "dataset[0].split=train[:3]"])
    assert cfg.epochs == 2
    assert cfg.dataset == [{**ALPACA, "weight": 1, "split": "train[:3]"}, {**ALPACA, "weight": 0.5}]


@pytest.mark.parametrize("override", ["dataset[2].weight=1", "epochs[0]=1", "absent[0].weight=1"])
def test_command_line_names_an_entry_that_does_not_exist(override):
    blocks = {"dataset": [{**ALPACA, "weight": 1}, {**ALPACA, "weight": 2}], "epochs": 1}
    with pytest.raises(UserError, match=re.escape(override)):
        merge(blocks, [override])
