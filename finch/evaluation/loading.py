"""A model and its tokenizer, as transformers loads them, ready to answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finch.errors import UserError
from finch.evaluation.adapter import merge_adapter
from finch.evaluation.fingerprint import hash_values
from finch.evaluation.model_folders import ModelFolder
from finch.models.hf_config import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STORED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def resolve_dtype(dtype: str, base: Path, device: torch.device) -> str:
    """A key of ``DTYPES``; for ``auto`` fp32 on a CPU, which computes the others slowly, else what the base's config.json says."""
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "fp32"
    config = read_config(base, "--base")
    return _STORED.get(str(config.get("dtype") or config.get("torch_dtype")), "fp32")


def load_model(folder: ModelFolder, dtype: str, device: torch.device) -> PreTrainedModel:
    """
    Args:
        folder: an adapter is merged into its base.
        dtype: a key of ``DTYPES``.
        device: where the model answers.

    Raises:
        UserError: transformers cannot load the folder, or the adapter does not fit.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder.base or folder.path, dtype=DTYPES[dtype], output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors have an exception for each kind of damage
        raise UserError(
            f"{folder} cannot be loaded by transformers ({_first_line(error)}); check the folder"
        ) from error
    model, info = loaded
    if missing := sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}):
        raise UserError(f"{folder} lacks weights of its model, such as {missing[0]}; give the complete folder")
    if folder.is_adapter:
        merge_adapter(model, folder.path, str(folder))
    model.eval()
    model.to(device)
    return model


def load_tokenizer(folder: Path, option: str) -> PreTrainedTokenizerBase:
    """
    Raises:
        UserError: transformers finds no tokenizer, or cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers, tokenizers and sentencepiece have an exception for each kind of damage
        raise UserError(
            f"{option}={folder} has no tokenizer that transformers can load ({_first_line(error)}); copy the tokenizer's files there"
        ) from error


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of all tokens and their numbers."""
    return hash_values(tokenizer.get_vocab())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
