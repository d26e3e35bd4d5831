"""Decoders built from a folder's config.json alone. Their equality with transformers is in test_families.py."""

import math
import subprocess
import sys

import pytest
import torch
from helpers.models import FAMILIES, VOCAB, edit_config, llama3_scaling, save

import finch.models
from finch.base.errors import UserError
from finch.config.instantiate import build, locate
from finch.config.methods import LORA
from finch.models.families import model_block
from finch.models.hf_config import FAMILIES as KNOWN_FAMILIES
from finch.models.lora import adapter_parameters, initialize_adapters
from finch.weights.conversion import CONVERSIONS
from finch.weights.huggingface import HuggingFaceFolder

WITH_LORA = [name for name in FAMILIES if name != "gemma2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_block_names_a_builder_and_its_sizes(tmp_path, name):
    save(name, tmp_path)
    block = model_block(tmp_path)
    component = FAMILIES[name].component.replace("llama2.llama2", "llama3.llama3")  # the same model
    expected = {"_component_": component, **FAMILIES[name].arguments, "norm_eps": pytest.approx(1e-5, rel=1e-7)}
    assert {key: value for key, value in block.items() if key in expected} == expected
    assert model_block(tmp_path, 32) == {**block, "max_seq_len": 32}


def test_llama_scaled_by_one_has_the_unscaled_builder(tmp_path):
    save("llama 3.1", tmp_path, rope_parameters={"rope_theta": 5e5, **llama3_scaling(1.0)})
    assert model_block(tmp_path)["_component_"] == "torchtune.models.llama3.llama3"


@pytest.mark.parametrize("name", WITH_LORA)
def test_lora_starts_from_the_same_function(tmp_path, name):
    """Also as method=lora builds it: ``lora_`` before the builder's name, and its settings added to the block; and with DoRA."""
    save(name, tmp_path)
    base, tokens = HuggingFaceFolder(str(tmp_path)), torch.randint(0, VOCAB, (2, 9))
    plain = finch.models.auto(str(tmp_path))
    plain.load_state_dict(dict(base.weights()))
    block = model_block(tmp_path)
    module, _, builder = block["_component_"].rpartition(".")
    for decoder in (
        finch.models.lora_auto(str(tmp_path), **LORA),
        finch.models.lora_auto(str(tmp_path), **LORA, use_dora=True),
        build({**block, "_component_": f"{module}.lora_{builder}", **LORA}, "model"),
    ):
        base.check_model(decoder, "finch.models.lora_auto")
        missing, unexpected = decoder.load_state_dict(dict(base.weights()), strict=False)
        assert (set(missing), unexpected) == (adapter_parameters(decoder).keys(), [])
        initialize_adapters(decoder, seed=0)
        with torch.no_grad():
            torch.testing.assert_close(decoder(tokens), plain(tokens), rtol=0, atol=1e-6)


def test_lora_where_it_is_impossible_is_refused(tmp_path):
    save("gemma2", tmp_path)
    with pytest.raises(UserError, match=r"no LoRA builder for Gemma 2; fine-tune it in full with finch\.models\.auto$"):
        finch.models.lora_auto(str(tmp_path), **LORA)
    save("qwen2 tied", tmp_path)
    block = {"_component_": "finch.models.lora_auto", "path": str(tmp_path), **LORA}
    for change, message in (
        ({"apply_lora_to_output": True}, "incompatible with tie_"),
        ({"lora_attn_modules": ["w9"]}, "names w9"),
    ):
        with pytest.raises(UserError, match=message):
            build({**block, **change}, "model")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "mixtral"}, r"holds a model of type 'mixtral', .* llama .Llama 2, 3.*SmolLM2., .* qwen3 .Qwen3.$"),
        ("llama", {"hidden_size": ...}, "has hidden_size=None, not a number above 0"),
        ("qwen2", {"rope_parameters": 5}, "has rope_parameters=5, not a block of settings; download it again"),
        ("qwen2", {"max_window_layers": "2"}, "has max_window_layers=2, not a whole number; download it again"),
        ("qwen2", {"num_hidden_layers": 2.5}, "has num_hidden_layers=2.5, not a whole number; download it again"),
        ("qwen2", {"rms_norm_eps": math.nan}, "has rms_norm_eps=nan, not a number above 0; download it again"),
        ("qwen2", {"rope_parameters": ...}, "has rope_theta=None, not a number above 0"),
        ("llama", {"head_dim": 16}, r"has head_dim=16, but the builder of Llama .* has hidden_size / num_attention_heads = 8;"),
        ("mistral", {"tie_word_embeddings": True}, "tie_word_embeddings=True, but the builder of Mistral has tie_word_embeddings=False"),
        ("llama", {"attention_bias": True}, "has attention_bias=True, but .* has no such bias"),
        ("llama", {"hidden_act": "gelu"}, "has hidden_act=gelu, but .* has silu"),
        ("gemma2", {"hidden_activation": "gelu"}, "has hidden_activation=gelu, but .* has gelu_pytorch_tanh"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, r"has layer_types\[0\]=full_attention, but in the builder of Gemma 2 only layers 0, 2"),
        ("gemma2", {"final_logit_softcapping": None}, "has final_logit_softcapping=None, but"),
        ("gemma2", {"use_bidirectional_attention": True}, "has use_bidirectional_attention=True, but"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "finch trains weights that are not quantized"),
        ("qwen2", {"rope_parameters": {**llama3_scaling(8.0), "rope_theta": 1e6}}, "has rope_type=llama3, but"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "has partial_rotary_factor=0.75, but the builder of Phi-3 and Phi-4 rotates"),
        ("llama 3.1", {"rope_parameters": {**llama3_scaling(8.0), "rope_theta": 5e5, "high_freq_factor": 8.0}}, "rope scaling's high_freq_factor=8.0, but"),
        ("llama 3.1", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "has factor=None, not a number"),
    ],
)  # fmt: skip
def test_model_that_the_builders_lack_is_refused(tmp_path, name, changes, message):
    save(name, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        finch.models.auto(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", KNOWN_FAMILIES)
def test_builders_of_the_table_exist(model_type):
    family = KNOWN_FAMILIES[model_type]
    for builder in family.builders:
        assert callable(locate(builder, "model"))
        module, _, name = builder.rpartition(".")
        assert hasattr(sys.modules[module], f"lora_{name}") is family.has_lora
    assert CONVERSIONS.keys() == KNOWN_FAMILIES.keys()


def test_folders_that_are_not_there_name_the_hubs_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost = f"/cache/hub/models--Acme--Tiny/snapshots/{'0a' * 20}"
    for path, name in (("Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/x", "OWNER/NAME"), (lost, f"Acme/Tiny@{'0a' * 20}")):
        with pytest.raises(UserError, match=rf"^model\.path={path} is not a folder; correct .*: model_dir={name}$"):
            finch.models.auto(path)
    with pytest.raises(UserError, match=r"has no config\.json; give a folder in Hugging Face's format"):
        model_block(tmp_path)


def test_table_and_block_need_no_torch():
    code = "import sys, finch.models.families; print(sorted({'torch', 'torchtune', 'omegaconf'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
