"""Replaces builders of torchtune 0.6.1 whose models differ from the published checkpoints by finch's builders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finch.config.instantiate import component_of

_WHY = {
    "gemma2": "caps hidden states where Gemma 2 caps logits, and exchanges the two caps",
    "phi4": "has Phi-3's base of the rotary embedding, 10000, where Phi-4 has 250000",
}
_BUILDERS = ("gemma2.gemma2_2b", "gemma2.gemma2_9b", "gemma2.gemma2_27b", "phi4.phi4_14b")


def replace_known_bad_builder(model: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """The ``model`` block to build, and a log message where it is not the config's own, else None.

    A torchtune config of these families then runs unchanged and trains the model of its checkpoint; the arguments are the
    same.
    """
    component = component_of(model) or ""
    name = component.removeprefix("torchtune.models.")
    if name == component or name not in _BUILDERS:
        return model, None
    message = f"model: {component} {_WHY[name.split('.')[0]]}; finch.models.{name} takes its place"
    return {**model, "_component_": f"finch.models.{name}"}, message
