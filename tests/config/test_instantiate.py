"""Configs by name, and components by their dotted path."""

import pytest

from finch.base.errors import UserError
from finch.config.instantiate import arguments_in_source, build, config_names, did_you_mean, find_config


def test_find_config_by_name_and_by_path(tmp_path):
    path = config_names()["stories260k/tofu_finch"]
    assert find_config("stories260k/tofu_finch") == find_config("stories260k/tofu_finch.yaml") == path
    file = tmp_path / "my.yaml"
    file.write_text("a: 1")
    assert find_config(str(file)) == file


def test_find_config_suggests_the_nearest_name():
    with pytest.raises(UserError, match=r"^stories260k/tofu_finhc .*did you mean stories260k/tofu_finch\?"):
        find_config("stories260k/tofu_finhc")
    with pytest.raises(UserError, match=r"finch has .*stories260k/tofu_sft"):
        find_config("/nowhere/at/all/x.yaml")


def test_did_you_mean():
    assert did_you_mean("ocean", ["epochs", "seed"]) == ""
    assert did_you_mean("epoch", ["epochs", "seed"]) == ", did you mean epochs?"
    assert did_you_mean("Adamw", ["Adam", "AdamW"], prefix="torch.optim.") == ", did you mean torch.optim.AdamW?"


def test_build_names_the_key_of_a_failing_component():
    with pytest.raises(UserError, match=r"model: torchtune\.models\.llama2\.llama2 cannot be built: TypeError"):
        build({"_component_": "torchtune.models.llama2.llama2"}, "model")


def test_arguments_are_those_of_the_source():
    assert arguments_in_source("finch.FinchLR")[:2] == ["optimizer", "eta_max"]
    assert arguments_in_source("torchtune.models") is None  # a module, which its package imports by its own name
