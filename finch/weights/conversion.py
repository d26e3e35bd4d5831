"""Converts weights between Hugging Face's and torchtune's names and layouts, by the model_type of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.phi3 import phi3_hf_to_tune, phi3_tune_to_hf
from torchtune.models.qwen2 import qwen2_hf_to_tune, qwen2_tune_to_hf

from finch.base.errors import UserError
from finch.models.gemma2 import gemma2_hf_to_tune, gemma2_tune_to_hf
from finch.models.hf_config import is_tied
from finch.models.qwen3 import qwen3_hf_to_tune, qwen3_tune_to_hf

StateDict = dict[str, torch.Tensor]
EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"  # torchtune's name of an output layer that is not tied to the embedding


@dataclass(frozen=True)
class StoredWeight:
    """A weight in Hugging Face's format, by its name there, and where torchtune's weights are in it.

    Attributes:
        tensor: of its shape and dtype, on the meta device.
        rows: by torchtune's names: row i of the weight is row ``rows[i]`` of the stored one.
    """

    name: str
    tensor: torch.Tensor
    rows: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """How one family's weights are renamed, permuted and split. Both functions take a state dict and config.json's content.

    Attributes:
        to_torchtune: converts any part of a Hugging Face state dict.
        to_hugging_face: converts any part of a torchtune state dict that has all or none of each group of ``fused``.
        fused: groups of torchtune's weights that Hugging Face stores as one, by the part of their names that differs.
    """

    to_torchtune: Callable[[StateDict, dict[str, Any]], StateDict]
    to_hugging_face: Callable[[StateDict, dict[str, Any]], StateDict]
    fused: tuple[tuple[str, ...], ...] = ()

    def rows_to_torchtune(self, name: str, num_rows: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Which rows of a stored weight each of torchtune's weights in it consists of; see ``StoredWeight.rows``.

        Conversions rename weights, permute and split their rows, and leave columns as they are.
        """
        # A fused weight is split by the true hidden size; where rows are permuted it is the number of columns.
        config = config if self.fused else with_columns(config, 1)
        return rows_of(lambda weights: self.to_torchtune(weights, config), name, num_rows)

    def stored_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]
    ) -> Iterator[StoredWeight]:
        """What Hugging Face stores for a model's weights; a fused weight comes where its group is complete.

        ``weights``: torchtune's names, in any order, and tensors on the meta device. Raises ValueError if they end before a group is complete.
        """
        pending: StateDict = {}
        for name, tensor in weights:
            pending[name] = tensor
            names = self._group(name)
            if all(member in pending for member in names):
                group = {member: pending.pop(member) for member in names}
                [(stored, converted)] = self.to_hugging_face(group, config).items()
                sizes = [len(member) for member in group.values()]
                # The conversion of row numbers shows where each row goes, whatever the family's layout is.
                numbers = dict(zip(group, torch.arange(sum(sizes)).unsqueeze(1).split(sizes), strict=True))
                [permuted] = self.to_hugging_face(numbers, with_columns(config, 1)).values()
                # The inverse: where each of torchtune's rows is stored.
                rows = permuted.squeeze(1).argsort().split(sizes)
                yield StoredWeight(stored, converted, dict(zip(group, rows, strict=True)))
        if pending:
            raise ValueError(f"{', '.join(pending)}: stored together with weights that are missing")

    def _group(self, name: str) -> list[str]:
        for parts in self.fused:
            for part in parts:
                if part in name:
                    return [name.replace(part, other) for other in parts]
        return [name]


def rows_of(convert: Callable[[StateDict], StateDict], name: str, num_rows: int) -> dict[str, torch.Tensor]:
    """The conversion of a weight's row numbers; see :meth:`Conversion.rows_to_torchtune`."""
    numbers = torch.arange(num_rows).unsqueeze(1)
    return {converted: rows.squeeze(1) for converted, rows in convert({name: numbers}).items()}


def with_columns(config: dict[str, Any], columns: int) -> dict[str, Any]:
    """A config.json with which conversions take weights of so many columns."""
    # Settled first: without it torchtune's conversions divide the hidden size, which is replaced here, by the heads.
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**config, "head_dim": head_dim, "hidden_size": columns}


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "dim": config["hidden_size"],
    }


def _by_heads(to_torchtune: Callable[..., StateDict], to_hugging_face: Callable[..., StateDict]) -> Conversion:
    """That of a family whose rows are permuted within heads of any width, by functions that take the sizes of torchtune's."""
    return Conversion(
        lambda weights, config: to_torchtune(weights, **_sizes(config), head_dim=config.get("head_dim")),
        lambda weights, config: to_hugging_face(weights, **_sizes(config), head_dim=config.get("head_dim")),
    )


_LLAMA = _by_heads(hf_to_tune, tune_to_hf)
_GEMMA2 = _by_heads(gemma2_hf_to_tune, gemma2_tune_to_hf)

# Rows are split and joined, not permuted: torchtune's Phi-3 rotates halves of a head, as Hugging Face's does.
_PHI3 = Conversion(
    to_torchtune=lambda weights, config: phi3_hf_to_tune(weights, **_sizes(config)),
    to_hugging_face=lambda weights, _: phi3_tune_to_hf(weights),
    fused=((".q_proj.", ".k_proj.", ".v_proj."), (".w1.", ".w3.")),
)

_QWEN2 = Conversion(
    # torchtune leaves out the head of a tied model, which some folders store as a second copy of the embedding.
    to_torchtune=lambda weights, config: qwen2_hf_to_tune(weights, tie_word_embeddings=is_tied(config)),
    to_hugging_face=lambda weights, _: qwen2_tune_to_hf(weights),
)

_QWEN3 = Conversion(
    to_torchtune=lambda weights, _: qwen3_hf_to_tune(weights),
    to_hugging_face=lambda weights, _: qwen3_tune_to_hf(weights),
)

CONVERSIONS: dict[str, Conversion] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "phi3": _PHI3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
}


def conversion_for(config: dict[str, Any], folder: str) -> Conversion:
    """The conversion of the family that a folder's config.json names. Raises UserError if finch has no conversion for the family."""
    model_type = str(config.get("model_type"))  # a file may hold anything
    if model_type not in CONVERSIONS:
        raise UserError(
            f"checkpointer.checkpoint_dir={folder} holds a model of type {model_type!r}, which finch cannot convert; it knows {', '.join(CONVERSIONS)}"
        )
    return CONVERSIONS[model_type]
