"""Small random models of every family, as transformers saves them and as torchtune builds them."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import finch.models
from finch.config.instantiate import locate
from finch.weights.huggingface import HuggingFaceFolder

VOCAB = 96
SIZE = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
    "norm_eps": 1e-5,
    "rope_base": 20000,
}
HF_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
    "initializer_range": 0.2,
    "pad_token_id": None,  # its row of the embedding would get no gradient
}


@dataclass
class Family:
    """A torchtune builder and a transformers architecture that make the same small model.

    Attributes:
        component: the builder's dotted path.
        architecture: transformers' name of the family.
        changes: what the builder's arguments have beside or other than ``SIZE``.
        hf_changes: what config.json has beside or other than ``HF_SIZE``.
        seq_len: tokens that its differences from other families need to show.
        atol: of logits and token losses against transformers, in nats; gradients have a tenth of it.
    """

    component: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    hf_changes: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 21
    atol: float = 1e-5

    @property
    def arguments(self) -> dict[str, Any]:
        return {**SIZE, **self.changes}

    def config(self, **changes: Any) -> dict[str, Any]:
        return {"_component_": self.component, **self.arguments, **changes}

    def build(self, **changes: Any) -> nn.Module:
        return locate(self.component, "model")(**{**self.arguments, **changes})


def llama3_scaling(factor: float) -> dict[str, Any]:
    """config.json's rope scaling of Llama 3.1 (factor 8) and 3.2 (32)."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3(version: str, factor: float | None = None, *, tied: bool = False) -> Family:
    # Long rows: the scaled frequencies are the low ones.
    rope = {"rope_theta": 5e5, **({} if factor is None else llama3_scaling(factor))}
    return Family(
        f"torchtune.models.{version}.{version}",
        "Llama",
        {"max_seq_len": 512, "rope_base": 5e5},
        {"max_position_embeddings": 512, "rope_parameters": rope, "tie_word_embeddings": tied},
        seq_len=400,
    )


def _qwen(version: int, *, tied: bool, **head: int) -> Family:
    changes = {**head, **({"tie_word_embeddings": True} if tied else {})}
    home = "torchtune.models.qwen2" if version == 2 else "finch.models.qwen3"
    return Family(f"{home}.qwen{version}", f"Qwen{version}", changes, changes)


_GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 24}
FAMILIES = {
    "llama": Family("torchtune.models.llama2.llama2", "Llama"),
    "llama 3": _llama3("llama3"),
    "llama 3.1": _llama3("llama3_1", 8.0),
    "llama 3.2": _llama3("llama3_2", 32.0, tied=True),
    # As SmolLM2: tied as Llama 3.2, without its rope scaling; the epsilon is 1e-5 as a GGUF file stores it.
    "smollm2": Family(
        "torchtune.models.llama3_2.llama3_2",
        "Llama",
        {"scale_factor": 1},
        {"tie_word_embeddings": True, "rms_norm_eps": 9.999999747378752e-06},
    ),
    "mistral": Family("torchtune.models.mistral.mistral", "Mistral", hf_changes={"sliding_window": None}),
    "qwen2": _qwen(2, tied=False),
    "qwen2 tied": _qwen(2, tied=True),
    "qwen3": _qwen(3, tied=False, head_dim=16),  # other than embed_dim / num_heads, as in Qwen3-4B
    "qwen3 tied": _qwen(3, tied=True, head_dim=16),
    # Gemma's logits are twice as large.
    "gemma": Family("torchtune.models.gemma.gemma", "Gemma", {"head_dim": 16}, {"head_dim": 16}, atol=2e-5),
    "gemma2": Family(
        "finch.models.gemma2.gemma2",
        "Gemma2",
        {**_GEMMA2, "hidden_capping_value": 5.0, "final_capping_value": 3.0, "sliding_window_size": 6},
        {**_GEMMA2, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 6},
        atol=2e-5,
    ),
    "phi3": Family("torchtune.models.phi3.phi3", "Phi3", {"num_kv_heads": 4}, {"num_key_value_heads": 4}),
    "phi3 grouped": Family("torchtune.models.phi3.phi3", "Phi3"),
}


def save(name: str, folder: Path, **hf_changes: Any) -> nn.Module:
    """Writes a random model of the family with transformers, and returns it as transformers loads it again."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.architecture}Config")(**{**HF_SIZE, **family.hf_changes, **hf_changes})
    model = getattr(transformers, f"{family.architecture}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        if "norm" in key:  # scales of 1 would hide norms in the wrong place, and Gemma's, which are stored minus 1
            nn.init.uniform_(parameter, 0.5, 1.5)
        if key.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def load(name: str, folder: Path, *, is_auto: bool = False) -> tuple[HuggingFaceFolder, nn.Module]:
    """The folder, and a decoder with its weights, by the family's builder or by ``auto``; checked against it first."""
    family, base = FAMILIES[name], HuggingFaceFolder(str(folder))
    decoder = finch.models.auto(str(folder)) if is_auto else family.build()
    base.check_model(decoder, "finch.models.auto" if is_auto else family.component)
    decoder.load_state_dict(dict(base.weights()))
    return base, decoder


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; ``...`` removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def peft_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT from 0.19 refuses to run with torchao below 0.16, which torchtune 0.6.1 needs. No weights of the tests are torchao's."""
    for module in ("peft.tuners.lora.torchao", "peft.utils.quantization_utils"):
        with contextlib.suppress(ImportError):  # the second is newer
            monkeypatch.setattr(importlib.import_module(module), "is_torchao_available", lambda: False)
