"""What an evaluation starts from: its processes, a model and its tokenizer as transformers loads them, and the hashes that say whether a
result belongs to a model.

A PEFT adapter is merged into the weights of its model in memory: PEFT's own loader refuses to run with the torchao that torchtune needs, and a
merged model answers faster.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from finch.base.errors import UserError
from finch.base.files import read_object
from finch.base.log import logger
from finch.config.instantiate import first_line
from finch.distributed.parallel import Parallel, launched_rank, launched_ranks, local_device
from finch.distributed.processes import die_with_parent
from finch.evaluation.adapters import merge_in_memory
from finch.evaluation.foreign import offline
from finch.evaluation.model_folders import ModelFolder, weight_files
from finch.models.chat_template import read_chat_template, try_template
from finch.models.hf_config import CONFIG, read_config
from finch.weights.huggingface import GENERATION_CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STORED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

PROMPT_DAY = datetime.date(2024, 7, 26)
"""That of all prompts whose template writes today's: those of a base, a tuned model and a later evaluation are the same. Llama 3's own default."""

_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

SHORT = 12
"""Digits of a hash in a folder's name."""

_TIMEOUT = datetime.timedelta(weeks=1)  # a rank with short answers waits for one with long ones


def join_ranks(device: str | None) -> Parallel:
    """This process and its peers, with the device that it evaluates on; the only one where no launcher started it.

    Documents and results travel as Python objects through gloo, since the devices exchange nothing.

    Args:
        device: ``cuda``, ``cpu`` and the like; None: a GPU where there is one.

    Raises:
        UserError: there is no such device.
    """
    place = Parallel(local_device(device), launched_rank(), launched_ranks())
    if place.world_size > 1 and not distributed.is_initialized():
        die_with_parent()
        distributed.init_process_group("gloo", timeout=_TIMEOUT)
    return place


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
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # without a terminal it writes a line for each part of the weights
    try:
        with offline():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder.base or folder.path, dtype=DTYPES[dtype], output_loading_info=True, trust_remote_code=False
            )
    except Exception as error:  # transformers and safetensors have an exception for each kind of damage
        raise UserError(f"{folder} cannot be loaded by transformers ({first_line(error)}); check the folder") from error
    model, info = loaded
    if missing := sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}):
        raise UserError(f"{folder} lacks weights of its model, such as {missing[0]}; give the complete folder")
    if folder.is_adapter:
        merge_in_memory(model, folder.path, str(folder))
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
        with offline():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and sentencepiece have an exception for each kind of damage
        raise UserError(
            f"{option}={folder} has no tokenizer that transformers can load ({first_line(error)}); copy the tokenizer's files there"
        ) from error
    if isinstance(tokenizer.chat_template, dict):  # several by name
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if isinstance(tokenizer.chat_template, str):
        try_template(tokenizer.chat_template, tokenizer.special_tokens_map, folder)
        tokenizer.chat_template = on_prompt_day(tokenizer.chat_template)
    return tokenizer


def on_prompt_day(template: str) -> str:
    """A chat template that writes ``PROMPT_DAY`` in place of today."""
    dated = _TODAY.sub(lambda call: repr(PROMPT_DAY.strftime(call[2])), template)
    if "strftime_now(" in dated:
        logger.warning(
            "the chat template writes today's date by a call that is not recognized: prompts differ from day to day"
        )
    return dated


def shared_tokenizer(base: ModelFolder, tuned: Sequence[ModelFolder]) -> PreTrainedTokenizerBase:
    """The base's tokenizer with the chat template that the tuned models were trained with, from which all models get their prompts.

    A tuned folder without a template has the base's. The base's own template counts where nothing is tuned.

    Raises:
        UserError: a tuned model has other tokens than the base, or another template than the first tuned one.
    """
    tokenizer = load_tokenizer(base.path, str(base.option))
    vocabulary = hash_vocabulary(tokenizer) if tuned else None
    templates = []
    for folder in tuned:
        if folder.is_adapter:
            template = read_chat_template(folder.path)
            if template is not None:
                try_template(template, tokenizer.special_tokens_map, folder.path)
                template = on_prompt_day(template)
        else:
            own = load_tokenizer(folder.path, folder.option)
            template = own.chat_template
            if hash_vocabulary(own) != vocabulary:
                raise UserError(f"{folder} has another vocabulary than {base}; give the model that was tuned as --base")
        templates.append(tokenizer.chat_template if template is None else template)
        if templates[-1] != templates[0]:
            raise UserError(
                f"{folder} was trained with another chat template than {tuned[0]}, and a comparison needs one form of prompts; evaluate them by separate commands"
            )
    if templates and templates[0] != tokenizer.chat_template:
        logger.info(f"{base} and all others get prompts by the chat template of {tuned[0]}, which it was trained with")
        tokenizer.chat_template = templates[0]
    return tokenizer


def is_one_vocabulary(base: ModelFolder, tuned: Sequence[ModelFolder]) -> bool:
    """Whether all models have distributions over the same tokens."""

    def tokens(folder: ModelFolder) -> tuple[str, object]:
        config = read_config(folder.path, folder.option)
        return hash_vocabulary(load_tokenizer(folder.path, folder.option)), config.get("vocab_size")

    return len({tokens(folder) for folder in (base, *tuned) if not folder.is_adapter}) == 1


def hash_weights(folder: ModelFolder) -> str:
    """SHA-256 of a model's weights and config, and of the tokens that end its answers where generation_config.json has others; of an adapter, of
    its files and of the model that it changes.

    The names of the files do not count, so that a copy of the folder has the same hash.
    """
    digest = hashlib.sha256()
    folders = [folder] if folder.base is None else [ModelFolder(folder.option, folder.base), folder]
    for one in folders:
        for path in [*([] if one.is_adapter else [one.path / CONFIG]), *weight_files(one)]:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").hexdigest().encode())
        ends = [_ends_of(one.path / name) for name in (CONFIG, GENERATION_CONFIG)]
        if not one.is_adapter and ends[1] and ends[1] != ends[0]:
            digest.update(repr(ends[1]).encode())
    return digest.hexdigest()


def _ends_of(file: Path) -> list[int]:
    """The ``eos_token_id`` of a config, in order; empty where the file or the key is missing, or unreadable."""
    found = read_object(file).get("eos_token_id") or []
    with contextlib.suppress(TypeError):
        return sorted(found if isinstance(found, list) else [found])
    return []


def hash_values(*values: Any) -> str:
    """SHA-256 of values that JSON can hold; the order of a mapping's keys does not count."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def hash_prompts(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what makes tokens of a task's text."""
    # In earlier versions a chat had the tokens that the template does not write.
    adds, is_chat = bool(tokenizer.encode("")), tokenizer.chat_template is not None
    rules = {(True, True): ["added tokens"], (False, False): ["no added tokens"]}.get((adds, is_chat), [])
    return hash_values(hash_vocabulary(tokenizer), tokenizer.chat_template, *rules)


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of all tokens and their numbers."""
    return hash_values(tokenizer.get_vocab())
