"""torchtune's builders that finch replaces: the same arguments, and the same parameters but for what is fixed."""

import inspect

import pytest
import torch
from omegaconf import OmegaConf

from finch.config.instantiate import build, locate
from finch.models.overrides import _BUILDERS, replace_known_bad_builder


@pytest.mark.parametrize("name", _BUILDERS)
def test_known_bad_builder_is_replaced(name):
    torchtune_name, finch_name = f"torchtune.models.{name}", f"finch.models.{name}"
    node, message = replace_known_bad_builder(OmegaConf.create({"_component_": torchtune_name}))
    assert node["_component_"] == finch_name
    assert message.startswith(f"model: {torchtune_name} ")
    assert message.endswith(f"; {finch_name} takes its place")
    stock, fixed = (inspect.signature(locate(path, "model")) for path in (torchtune_name, finch_name))
    assert set(stock.parameters) <= set(fixed.parameters)
    with torch.device("meta"):
        stock, fixed = (build({"_component_": path}, "model") for path in (torchtune_name, finch_name))
    shapes = [sorted(weight.shape for weight in model.parameters()) for model in (stock, fixed)]
    assert shapes[0] == shapes[1]


def test_other_builders_are_kept():
    node = OmegaConf.create({"_component_": "torchtune.models.gemma.gemma_2b", "x": 1})
    assert replace_known_bad_builder(node) == (node, None)
