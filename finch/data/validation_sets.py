"""The sets of ``dataset_validation``: one, or several by their names."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from finch.config.instantiate import component_of


def validation_sets(node: Any) -> dict[str, tuple[str, Any]]:
    """From the name of each set's loss in the metrics to its config key and its block, in the config's order.

    One set has ``validation_loss``, named ones ``validation/NAME/loss``.
    """
    if node is None:
        return {}
    if component_of(node) is not None or not isinstance(node, DictConfig):
        return {"validation_loss": ("dataset_validation", node)}
    return {f"validation/{name}/loss": (f"dataset_validation.{name}", node[name]) for name in map(str, node)}
