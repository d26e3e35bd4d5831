"""Small random models of every family, as transformers saves them and as torchtune builds them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finch.config.instantiate import locate
from finch.weights.huggingface import HuggingFaceFolder

VOCAB = 96


SIZE = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}


SIZE |= {"intermediate_dim": 48, "max_seq_len": 64, "norm_eps": 1e-5, "rope_base": 20000}


@dataclass
class Family:
    """A torchtune builder with its own arguments, and the same model in transformers' words."""

    component: str
    architecture: str
    ours: dict = field(default_factory=dict)
    theirs: dict = field(default_factory=dict)

    def build(self, **changes):
        return locate(self.component, "model")(**{**SIZE, **self.ours, **changes})


GEMMA2 = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}


GEMMA2 |= {"sliding_window": 6, "head_dim": 16}


LLAMA3_ROPE = {"rope_theta": 20000.0, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}


LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


LLAMA3_2 = {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}


WITH_GROUPS, WITHOUT = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}


FAMILIES = {
    "llama": Family("torchtune.models.llama2.llama2", "Llama"),
    "llama 3.2": Family("torchtune.models.llama3_2.llama3_2", "Llama", theirs=LLAMA3_2),
    "mistral": Family("torchtune.models.mistral.mistral", "Mistral", theirs={"sliding_window": None}),
    "qwen2": Family("torchtune.models.qwen2.qwen2", "Qwen2"),
    "qwen2 tied": Family(
        "torchtune.models.qwen2.qwen2", "Qwen2", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}
    ),
    "gemma": Family("torchtune.models.gemma.gemma", "Gemma", {"head_dim": 16}, {"head_dim": 16}),
    "gemma2": Family(
        "finch.models.gemma2.gemma2",
        "Gemma2",
        {"head_dim": 16, "hidden_capping_value": 5.0, "final_capping_value": 3.0, "query_pre_attn_scalar": 24}
        | {"sliding_window_size": 6},
        GEMMA2,
    ),
    "phi3": Family("torchtune.models.phi3.phi3", "Phi3", {"num_kv_heads": 4}, WITHOUT),
    "phi3 grouped": Family("torchtune.models.phi3.phi3", "Phi3", theirs=WITH_GROUPS),
}


def save(name, folder, **changes):
    """A random model as transformers saves it, and loads it again."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.architecture}Config")(
        **{
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
            **family.theirs,
            **changes,
        }
    )
    model = getattr(transformers, f"{family.architecture}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        if "norm" in key:  # norms in each other's place would not show otherwise; Gemma's scale is one more
            nn.init.uniform_(parameter, 0.5, 1.5)
        if key.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def load(name, folder):
    family, base = FAMILIES[name], HuggingFaceFolder(str(folder))
    decoder = family.build()
    base.check_model(decoder, family.component)
    decoder.load_state_dict(dict(base.weights()))
    return base, decoder


QWEN3_SIZE = {
    "vocab_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "head_dim": 16,  # apart from embed_dim / num_heads, as in Qwen3-4B
    "max_seq_len": 64,
    "rope_base": 1e4,
    "norm_eps": 1e-6,
}


def save_qwen3(folder, tied, vocab_size=96, head_dim=16):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_theta=1e4,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # scales of 1 would hide norms in the wrong place
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


LLAMA3_SIZE = {
    "vocab_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 512,
    "intermediate_dim": 48,
    "norm_eps": 1e-5,
}


def save_llama3(folder, rope_scaling, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        rope_theta=5e5,
        rope_scaling=None if rope_scaling is None else {**rope_scaling, "rope_theta": 5e5},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def llama3_scaling(factor):
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
