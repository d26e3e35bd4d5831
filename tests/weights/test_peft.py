"""Adapters and merged models, as written, against PEFT's on transformers' model of the same family."""

import contextlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.models import FAMILIES as MODEL_FAMILIES
from helpers.models import LLAMA3_SIZE, QWEN3_SIZE, SIZE, save, save_llama3, save_qwen3
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from finch.config.instantiate import locate
from finch.errors import UserError
from finch.models.lora import adapter_layers, adapter_parameters, initialize_adapters, merged
from finch.weights.formats import NativeFolder
from finch.weights.huggingface import HuggingFaceFolder
from finch.weights.peft import PeftFolder

ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
LORA = {"lora_rank": 6, "lora_alpha": 9}


@pytest.fixture(autouse=True)
def no_torchao(monkeypatch):
    """PEFT from 0.19 refuses to run beside torchao below 0.16, which torchtune 0.6.1 needs. No weights here are torchao's."""
    for module in ("peft.tuners.lora.torchao", "peft.utils.quantization_utils"):
        with contextlib.suppress(ImportError):  # the second is newer
            monkeypatch.setattr(importlib.import_module(module), "is_torchao_available", lambda: False)


@dataclass
class Family:
    """A LoRA builder with its own arguments, and what saves the same model with transformers."""

    component: str
    arguments: dict
    save: object


def from_families(name, component):
    family = MODEL_FAMILIES[name]
    return Family(component, SIZE | family.ours, lambda folder: save(name, folder))


def of_qwen3(tied):
    arguments = QWEN3_SIZE | {"tie_word_embeddings": tied}
    return Family("finch.models.qwen3.lora_qwen3", arguments, lambda folder: save_qwen3(folder, tied))


FAMILIES = {
    "llama3": Family(
        "torchtune.models.llama3.lora_llama3",
        LLAMA3_SIZE | {"rope_base": 5e5},
        lambda folder: save_llama3(folder, None, False),
    ),
    "qwen3": of_qwen3(tied=False),
    "qwen3 tied": of_qwen3(tied=True),
    "qwen2": from_families("qwen2", "torchtune.models.qwen2.lora_qwen2"),  # biases
    "mistral": from_families("mistral", "torchtune.models.mistral.lora_mistral"),
    "gemma": from_families("gemma", "torchtune.models.gemma.lora_gemma"),  # heads of their own width
}


def adapted(name, folder, **options):
    """The pretrained folder, and a decoder on it whose adapters hold random values."""
    family = FAMILIES[name]
    family.save(folder)
    decoder = locate(family.component, "model")(
        ATTENTION, **{"apply_lora_to_mlp": True, **family.arguments, **LORA, **options}
    )
    base = HuggingFaceFolder(str(folder))
    stored = decoder.state_dict(keep_vars=True)
    with torch.no_grad():
        for key, tensor in base.weights():
            if key in stored:
                stored[key].copy_(tensor)
    initialize_adapters(decoder, seed=0)
    for parameter in adapter_parameters(decoder).values():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data *= torch.rand_like(parameter) + 0.5
    return base, decoder.eval()


def check_against_peft(name, tmp_path, **options):
    base, decoder = adapted(name, tmp_path / "base", **options)
    PeftFolder(decoder, base).write(decoder, tmp_path / "adapter", is_writer=True)
    base.write(merged(decoder), tmp_path / "merged", is_writer=True)
    tokens = torch.randint(0, 96, (2, 21))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        before = plain(tokens).logits
        theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        logits = theirs(tokens).logits
        assert (logits - before).abs().max() > 0.1
        torch.testing.assert_close(decoder(tokens), logits, rtol=0, atol=2e-5)
        torch.testing.assert_close(alone(tokens).logits, logits, rtol=0, atol=2e-5)
        # Every tensor of the file has its place in PEFT's model.
        loaded = {key.replace(".default", ""): tensor for key, tensor in theirs.state_dict().items()}
        for key, tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
            key = f"{key}.weight" if key.endswith("magnitude_vector") else key
            assert torch.equal(loaded[key], tensor), key
        unloaded = theirs.merge_and_unload()
        torch.testing.assert_close(alone(tokens).logits, unloaded(tokens).logits, rtol=0, atol=2e-5)
    weights = unloaded.state_dict()
    for key, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_the_same_model(tmp_path, name):
    check_against_peft(name, tmp_path)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_with_the_output_layer_and_dora(tmp_path, name, use_dora):
    check_against_peft(name, tmp_path, apply_lora_to_output=True, use_dora=use_dora)


def test_the_config_names_what_was_trained(tmp_path):
    base, decoder = adapted("llama3", tmp_path / "base", apply_lora_to_mlp=False, lora_dropout=0.25)
    PeftFolder(decoder, base).write(decoder, tmp_path / "adapter", is_writer=True, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (6, 9, 0.25, "none")
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert len(stored) == 2 * 4 * 2
    tokens = torch.randint(0, 96, (1, 9))
    whole = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds the base by its path
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens).logits, decoder(tokens), rtol=0, atol=0.05)


def test_the_folder_is_replaced_whole(tmp_path):
    base, decoder = adapted("qwen3", tmp_path / "base")
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "old").touch()
    folder = PeftFolder(decoder, base)
    folder.write(decoder, target, is_writer=False)
    assert [path.name for path in target.iterdir()] == ["old"]
    folder.write(decoder, target, is_writer=True)
    assert sorted(path.name for path in target.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (tmp_path / "adapter.partial").exists()


def test_what_pefts_format_cannot_hold_is_told(tmp_path):
    base, decoder = adapted("qwen3", tmp_path / "qwen3")
    with pytest.raises(UserError, match=r"has no config.json, without which"):
        PeftFolder(decoder, NativeFolder(Path(tmp_path), [], dict, dict))
    next(iter(adapter_layers(decoder).values())).alpha = 1
    with pytest.raises(UserError, match="differ in rank or alpha"):
        PeftFolder(decoder, base)

    save("phi3", tmp_path / "phi3")
    sizes = SIZE | MODEL_FAMILIES["phi3"].ours | LORA
    builder = locate("torchtune.models.phi3.lora_phi3", "model")
    fused = HuggingFaceFolder(str(tmp_path / "phi3"))
    with pytest.raises(UserError, match=r"layers.0.attn.q_proj cannot be written in PEFT's format: phi3 models store"):
        PeftFolder(builder(ATTENTION, **sizes), fused)
    PeftFolder(builder(["output_proj"], **sizes), fused)
