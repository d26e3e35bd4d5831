"""Builders that take a Hugging Face folder instead of sizes: ``finch.models.auto`` and ``finch.models.lora_auto``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtune.modules import TransformerDecoder

from finch.base.errors import UserError
from finch.config.instantiate import build
from finch.models.families import model_block
from finch.models.hf_config import FAMILIES, read_config
from finch.models.lora import check_attention_modules

_OPTION = "model.path"


def auto(path: str, max_seq_len: int | None = None) -> TransformerDecoder:
    """The decoder of a Hugging Face folder's config.json, without its weights.

    ``max_seq_len``: longest sequence in tokens; None: the folder's max_position_embeddings. Raises UserError as
    :func:`finch.models.families.model_block`.
    """
    return build(model_block(Path(path), max_seq_len, option=_OPTION), "model")


def lora_auto(
    path: str,
    lora_attn_modules: Sequence[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    *,
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    max_seq_len: int | None = None,
) -> TransformerDecoder:
    """:func:`auto` with LoRA layers; their arguments are those of :func:`finch.models.qwen3.lora_qwen3`.

    Raises UserError also for a family without LoRA builders, and for LoRA on a tied output layer.
    """
    lora = dict(locals())  # the arguments but for two are the builders'
    del lora["path"], lora["max_seq_len"]
    check_attention_modules(lora_attn_modules)
    block = model_block(Path(path), max_seq_len, option=_OPTION)
    family = FAMILIES[read_config(Path(path))["model_type"]]
    module, _, builder = block["_component_"].rpartition(".")
    if not family.has_lora:
        raise UserError(
            f"model._component_=finch.models.lora_auto: finch has no LoRA builder for {family.name}; fine-tune it in full with finch.models.auto"
        )
    if not apply_lora_to_output:  # Gemma's builder lacks the argument
        del lora["apply_lora_to_output"]
    return build({**block, "_component_": f"{module}.lora_{builder}", **lora}, "model")
