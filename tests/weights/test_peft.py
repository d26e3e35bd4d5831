"""Adapters and merged models, as written, against PEFT's on transformers' model of the same family."""

import json
from pathlib import Path

import pytest
import torch
from helpers.models import FAMILIES, peft_without_torchao, save
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from finch.base.errors import UserError
from finch.checkpoint.manifest import EXPORTS
from finch.config.instantiate import locate
from finch.evaluation.adapters import merge_folder
from finch.models.chat_template import read_chat_template
from finch.models.lora import adapter_layers, adapter_parameters, initialize_adapters, merged
from finch.weights.formats import NativeFolder
from finch.weights.huggingface import HuggingFaceFolder
from finch.weights.peft import PeftFolder

ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
LORA = {"lora_rank": 6, "lora_alpha": 9}


@pytest.fixture(autouse=True)
def no_torchao(monkeypatch):
    peft_without_torchao(monkeypatch)


# Families with a LoRA builder, and the builder's dotted path.
LORA_BUILDERS = {
    "llama 3": "torchtune.models.llama3.lora_llama3",
    "qwen3": "finch.models.qwen3.lora_qwen3",
    "qwen3 tied": "finch.models.qwen3.lora_qwen3",
    "qwen2": "torchtune.models.qwen2.lora_qwen2",  # biases
    "mistral": "torchtune.models.mistral.lora_mistral",
    "gemma": "torchtune.models.gemma.lora_gemma",  # heads of another width
    "phi3": "torchtune.models.phi3.lora_phi3",  # three projections in one weight
    "phi3 grouped": "torchtune.models.phi3.lora_phi3",
}


def random_adapter(name, folder, **options):
    """A pretrained folder, and a decoder on it whose adapters hold random values."""
    save(name, folder)
    arguments = {"apply_lora_to_mlp": True, **FAMILIES[name].arguments, **LORA, **options}
    decoder = locate(LORA_BUILDERS[name], "model")(**{"lora_attn_modules": ATTENTION, **arguments})
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


OUTPUT_TOO = [{"apply_lora_to_output": True, "use_dora": dora} for dora in (False, True)]


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in LORA_BUILDERS]
    + [(name, each) for name in ("llama 3", "qwen3") for each in OUTPUT_TOO]
    + [("phi3 grouped", {"use_dora": True}), ("phi3 grouped", {"lora_attn_modules": ["k_proj", "output_proj"]})],
)
def test_adapter_and_merged_model_equal_pefts(tmp_path, name, options):
    base, decoder = random_adapter(name, tmp_path / "base", **options)
    PeftFolder(decoder, base).write(decoder, tmp_path / "adapter", is_writer=True)
    base.write(merged(decoder), tmp_path / "merged", is_writer=True)
    tokens = torch.randint(0, 96, (2, 21))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        before = plain(tokens).logits
        peft_model = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        logits = peft_model(tokens).logits
        assert (logits - before).abs().max() > 0.1
        torch.testing.assert_close(decoder(tokens), logits, rtol=0, atol=2e-5)
        torch.testing.assert_close(merged_model(tokens).logits, logits, rtol=0, atol=2e-5)
        # Every tensor of the file has its place in PEFT's model.
        loaded = {key.replace(".default", ""): tensor for key, tensor in peft_model.state_dict().items()}
        for key, tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
            key = f"{key}.weight" if key.endswith("magnitude_vector") else key
            assert torch.equal(loaded[key], tensor), key
        merged_by_peft = peft_model.merge_and_unload()
        torch.testing.assert_close(merged_model(tokens).logits, merged_by_peft(tokens).logits, rtol=0, atol=2e-5)
    weights = merged_by_peft.state_dict()
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "by_files")
    for key, tensor in load_file(tmp_path / "by_files" / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-6, msg=key)
    for key, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-6, msg=key)


def test_adapter_config_names_the_trained_modules(tmp_path):
    base, decoder = random_adapter("llama 3", tmp_path / "base", apply_lora_to_mlp=False, lora_dropout=0.25)
    PeftFolder(decoder, base).write(decoder, tmp_path / "adapter", is_writer=True, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = {"target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"], "r": 6, "lora_alpha": 9, "bias": "none"}
    assert config.items() >= {**expected, "lora_dropout": 0.25}.items()
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert len(stored) == 2 * 4 * 2
    tokens = torch.randint(0, 96, (1, 9))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds the base by its path
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, decoder(tokens), rtol=0, atol=0.05)


def test_folder_is_replaced_by_the_writer_only(tmp_path):
    base, decoder = random_adapter("qwen3", tmp_path / "base")
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "old").touch()
    folder = PeftFolder(decoder, base)
    folder.write(decoder, target, is_writer=False)
    assert [path.name for path in target.iterdir()] == ["old"]
    folder.write(decoder, target, is_writer=True)
    assert {path.name for path in target.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", EXPORTS}
    assert not (tmp_path / "adapter.partial").exists()


def test_adapter_and_merged_folder_answer_as_they_were_trained(tmp_path):
    """With the trained chat template; and they end where an answer of it ends, also where that is not the model's own end."""
    base, decoder = random_adapter("qwen3", tmp_path / "base")
    base.chat_template, base.stop_tokens = "{{ messages }}", [7, 9]
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 9, "top_p": 0.8}')
    PeftFolder(decoder, base).write(decoder, tmp_path / "adapter", is_writer=True)
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    base.write(base.weights(), tmp_path / "full", is_writer=True)
    assert {read_chat_template(tmp_path / name) for name in ("adapter", "merged", "full")} == {"{{ messages }}"}
    for name in ("adapter", "merged", "full"):
        assert json.loads((tmp_path / name / "generation_config.json").read_text()) == {
            "eos_token_id": [9, 7],
            "top_p": 0.8,
        }
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").generation_config.eos_token_id == [9, 7]
    assert set(json.loads((tmp_path / "full" / "config.json").read_text())["eos_token_id"]) >= {7, 9}
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_what_pefts_format_cannot_hold_is_refused(tmp_path):
    base, decoder = random_adapter("qwen3", tmp_path / "qwen3")
    with pytest.raises(UserError, match=r"has no config.json, without which"):
        PeftFolder(decoder, NativeFolder(Path(tmp_path), [], dict, dict))
    next(iter(adapter_layers(decoder).values())).alpha = 1
    with pytest.raises(UserError, match="differ in rank or alpha"):
        PeftFolder(decoder, base)

    attention = {"lora_attn_modules": ["q_proj", "k_proj"], "use_dora": True}
    with pytest.raises(
        UserError, match=r"DoRA without layers.0.attn.v_proj.weight cannot be .*: phi3 models store it in"
    ):
        PeftFolder(*reversed(random_adapter("phi3", tmp_path / "phi3", **attention)))
