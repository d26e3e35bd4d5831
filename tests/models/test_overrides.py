"""torchtune's builders that finch replaces: the same arguments, and the same parameters but for what is mended."""

import inspect

import pytest
import torch
from omegaconf import OmegaConf

from finch.config.instantiate import build, locate
from finch.models.overrides import _BUILDERS, replace_known_bad_builder


@pytest.mark.parametrize("name", _BUILDERS)
def test_a_builder_that_is_replaced(name):
    theirs, ours = f"torchtune.models.{name}", f"finch.models.{name}"
    node, told = replace_known_bad_builder(OmegaConf.create({"_component_": theirs}))
    assert node["_component_"] == ours
    assert told.startswith(f"model: {theirs} ")
    assert told.endswith(f"; {ours} takes its place")
    assert set(inspect.signature(locate(theirs, "model")).parameters) <= set(
        inspect.signature(locate(ours, "model")).parameters
    )
    with torch.device("meta"):
        stock, mended = (build({"_component_": path}, "model") for path in (theirs, ours))
    assert sorted(weight.shape for weight in stock.parameters()) == sorted(
        weight.shape for weight in mended.parameters()
    )


def test_every_other_builder_stays():
    node = OmegaConf.create({"_component_": "torchtune.models.gemma.gemma_2b", "x": 1})
    assert replace_known_bad_builder(node) == (node, None)
