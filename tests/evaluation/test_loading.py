"""Models as transformers loads them, and an adapter merged in memory, against PEFT's own merge."""

import json
import shutil

import peft
import pytest
import torch
from helpers.models import peft_without_torchao
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finch.base.errors import UserError
from finch.evaluation.adapters import merge_in_memory
from finch.evaluation.loading import load_model, load_tokenizer, resolve_dtype, shared_tokenizer
from finch.evaluation.model_folders import ModelFolder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_torchao(monkeypatch):
    peft_without_torchao(monkeypatch)


@pytest.fixture
def folder(base_folder, tmp_path):
    return ModelFolder("--tuned", shutil.copytree(base_folder, tmp_path / "tuned"))


def test_model_has_the_dtype_that_is_given(folder):
    assert {parameter.dtype for parameter in load_model(folder, "bf16", CPU).parameters()} == {torch.bfloat16}


def test_missing_and_broken_weights_are_refused(folder):
    # transformers would put random values in their place.
    weights = load_file(folder.path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder.path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights of its model, such as model\.norm\.weight"):
        load_model(folder, "fp32", CPU)
    (folder.path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"--tuned=.* cannot be loaded by transformers"):
        load_model(folder, "fp32", CPU)


def test_automatic_dtype_is_the_bases_on_a_gpu(base_folder):
    assert resolve_dtype("auto", base_folder, torch.device("cuda")) == "fp32"
    assert resolve_dtype("auto", base_folder, CPU) == "fp32"
    assert resolve_dtype("bf16", base_folder, CPU) == "bf16"


@pytest.mark.parametrize("is_adapter", [False, True])
def test_all_models_get_the_template_that_the_tuned_ones_were_trained_with(base_folder, tmp_path, is_adapter, caplog):
    base, template = ModelFolder("--base", base_folder), "{{ messages[0].content }}"
    tuned = []
    for name in ("a", "b"):
        path = tmp_path / name
        if is_adapter:
            path.mkdir()
        else:
            shutil.copytree(base_folder, path)
        (path / "chat_template.jinja").write_text(template)
        tuned.append(ModelFolder("--tuned", path, base=base_folder if is_adapter else None))
    with caplog.at_level("INFO", logger="finch"):
        assert shared_tokenizer(base, tuned).chat_template == template
    message = f"--base={base_folder} and all others get prompts by the chat template of --tuned={tuned[0].path}"
    assert message in caplog.text
    assert shared_tokenizer(base, []).chat_template != template
    (tuned[1].path / "chat_template.jinja").write_text(template + "!")
    with pytest.raises(UserError, match=r"--tuned=.*b was trained with another chat template than --tuned=.*a, and a"):
        shared_tokenizer(base, tuned)


def save_adapter(base_folder, folder, **options):
    """A random adapter as PEFT writes it; returns PEFT's own merged model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{**settings, **options}))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


def load_adapter(base_folder, folder):
    return load_model(ModelFolder("--tuned", folder, base=base_folder), "fp32", CPU)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_merged_weights_equal_pefts(base_folder, tmp_path, options):
    expected = save_adapter(base_folder, tmp_path, **options).state_dict()
    before = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32).state_dict()
    merged = load_adapter(base_folder, tmp_path).state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)
    assert sum(not torch.equal(tensor, before[name]) for name, tensor in merged.items()) == 2 * 3  # two layers


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bias", "all", "has bias=all in adapter_config.json, which finch cannot merge; merge it with PEFT"),
        ("modules_to_save", ["lm_head"], "has modules_to_save="),
        ("init_lora_weights", "pissa", "has init_lora_weights=pissa in"),
        ("a_setting_of_tomorrow", True, "has a_setting_of_tomorrow=True in"),
    ],
)
def test_other_adapters_are_refused(base_folder, tmp_path, key, value, message):
    save_adapter(base_folder, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=message):
        load_adapter(base_folder, tmp_path)


def test_adapter_of_another_model_is_refused(base_folder, tmp_path):
    save_adapter(base_folder, tmp_path, target_modules=["down_proj"])
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor[:, :24].contiguous() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"mlp.down_proj of shape \[32, 24\], in the base it has \[32, 48\]"):
        load_adapter(base_folder, tmp_path)


def test_adapter_of_a_tied_head_is_refused(base_folder, tmp_path):
    save_adapter(base_folder, tmp_path, target_modules=["lm_head"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if ".lora_" in name}, file)  # as finch writes it
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(UserError, match="lm_head, which shares its weight with the embedding"):
        merge_in_memory(model, tmp_path, "--tuned=here")


def test_of_templates_by_name_the_default_one_is_tried(folder):
    file = folder.path / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    for template, message in (("{{ 99999999 ** 99999999 }}", "does not end well"), ("a", None)):
        templates = [{"name": "default", "template": template}, {"name": "other", "template": "b"}]
        file.write_text(json.dumps({**config, "chat_template": templates}))
        if message is None:
            assert load_tokenizer(folder.path, "--tuned").chat_template == "a"
            continue
        with pytest.raises(UserError, match=message):
            load_tokenizer(folder.path, "--tuned")
