"""Every family that torchtune ships and finch converts, as a small random model, against transformers on the same files."""

import importlib
import inspect
import json
import random
import re

import pytest
import torch
import transformers
from helpers.models import FAMILIES, VOCAB, edit_config, llama3_scaling, load, save
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from torchtune.models.gemma2 import _convert_weights as torchtune_gemma2_weights
from torchtune.models.gemma2 import gemma2 as torchtune_gemma2
from transformers import AutoConfig

from finch.base.errors import UserError
from finch.config.instantiate import build, locate
from finch.models.families import _WRONG_BUILDERS, replace_known_bad_builder
from finch.models.hf_config import FAMILIES as KNOWN_FAMILIES
from finch.models.hf_config import is_tied, read_config, rope_settings
from finch.training.chunked_loss import TokenLoss
from finch.weights.huggingface import HuggingFaceFolder

QWEN3 = {"0_6b": 596_049_920, "1_7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360}


def check(name, folder, **changes):
    HuggingFaceFolder(str(folder)).check_model(FAMILIES[name].build(**changes), FAMILIES[name].component)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_auto", [False, True], ids=["builder", "auto"])
def test_logits_losses_and_gradients_equal_transformers(tmp_path, name, is_auto):
    reference = save(name, tmp_path)
    base, decoder = load(name, tmp_path, is_auto=is_auto)
    atol = FAMILIES[name].atol
    tokens = torch.randint(0, VOCAB, (3, FAMILIES[name].seq_len))
    logits = reference(tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), logits, rtol=0, atol=atol)

    labels = torch.roll(tokens, -1, dims=1)
    labels[0, :9], labels[:, -1] = -100, -100
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    targets = (labels.flatten() != -100).nonzero().squeeze(1)
    batch = {"tokens": tokens, "labels": labels, "targets": targets}
    token_loss = TokenLoss(decoder, num_chunks=3)(batch)["loss"]
    torch.testing.assert_close(token_loss, expected.view_as(labels), rtol=0, atol=atol)
    token_loss.mean().backward()
    expected.mean().backward()
    # Renaming, permuting and splitting are linear, so that gradients convert as weights do.
    gradients = base._to_torchtune({key: parameter.grad for key, parameter in reference.named_parameters()})
    parameters = dict(decoder.named_parameters())
    assert gradients.keys() == parameters.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(parameters[key].grad, gradient, rtol=1e-4, atol=atol / 10, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_changed_weights_are_written_exactly(tmp_path, name):
    """Twice the weights: what is written is the model's, not the folder's, and each has its place."""
    reference = save(name, tmp_path / "base")
    base, decoder = load(name, tmp_path / "base")
    weights = [(key, 2 * tensor) for key, tensor in decoder.state_dict().items()]
    random.Random(0).shuffle(weights)  # one at a time, in any order
    base.write(weights, tmp_path / "out", is_writer=True)
    original, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "out"))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], 2 * original[key]) for key in original)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, VOCAB, (1, FAMILIES[name].seq_len))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
        assert torch.equal(again(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_builder_of_another_family_is_refused(tmp_path, name):
    save(name, tmp_path)
    base, family = HuggingFaceFolder(str(tmp_path)), FAMILIES[name]
    other = FAMILIES["gemma" if family.architecture == "Llama" else "llama"]
    message = rf"holds a {base.config['model_type']} model .{family.architecture}ForCausalLM."
    with pytest.raises(UserError, match=message):
        base.check_model(other.build(), other.component)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *((name, {"rope_base": 3e4}, f"rope base 30000, .* says {FAMILIES[name].arguments['rope_base']:g}") for name in FAMILIES),
        *((name, {"norm_eps": 1e-6}, "norm epsilon 1e-06") for name in FAMILIES),
        ("smollm2", {"norm_eps": 1.0001e-5}, r"norm epsilon 1\.0001e-05, .* says 1e-05"),
        ("llama 3.1", {"scale_factor": 32}, "rope scaling factor 32, .* says 8"),
        ("gemma2", {"hidden_capping_value": 4.0}, "attn_logit_softcapping .0: none. 4, .* says 5"),
        ("gemma2", {"final_capping_value": 4.0}, "final_logit_softcapping .0: none. 4, .* says 3"),
        ("gemma2", {"sliding_window_size": 5}, "sliding_window .0: none. 5, .* says 6"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query scale 0.25, .* says 0.204"),
        ("gemma2", {"num_kv_heads": 4, "head_dim": 8, "num_heads": 8}, "number of attention heads 8"),
        ("qwen3", {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}, "number of attention heads 2, .* says 4"),
        ("qwen2", {"tie_word_embeddings": True}, "tied embeddings .* 1, .* says 0"),
        ("qwen2 tied", {"tie_word_embeddings": False}, "tied embeddings .* 0, .* says 1"),
    ],
)  # fmt: skip
def test_settings_that_shapes_do_not_show_are_compared(tmp_path, name, change, message):
    save(name, tmp_path)
    check(name, tmp_path)
    with pytest.raises(UserError, match=message):
        check(name, tmp_path, **change)


def test_rope_scaling_by_one_is_none(tmp_path):
    plain, scaled = FAMILIES["llama 3"], FAMILIES["llama 3.1"]
    save("llama 3.1", tmp_path)
    with pytest.raises(UserError, match=r"rope scaling .1: on. 0, config.json of .* says 1"):
        HuggingFaceFolder(str(tmp_path)).check_model(plain.build(), plain.component)
    save("llama 3.1", tmp_path, rope_parameters={"rope_theta": 5e5, **llama3_scaling(1.0)})
    HuggingFaceFolder(str(tmp_path)).check_model(plain.build(), plain.component)
    save("llama 3", tmp_path)
    HuggingFaceFolder(str(tmp_path)).check_model(scaled.build(scale_factor=1), scaled.component)


def test_older_config_json_says_the_same(tmp_path):
    save("llama 3.1", tmp_path)
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    edit_config(tmp_path, rope_parameters=..., rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
    check("llama 3.1", tmp_path)
    with pytest.raises(UserError, match=r"rope base 10000, .* says 500000"):
        check("llama 3.1", tmp_path, rope_base=1e4)
    with pytest.raises(UserError, match=r"rope scaling factor 4, .* says 8"):
        check("llama 3.1", tmp_path, scale_factor=4)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {**llama3_scaling(4.0), "rope_theta": 2e5},
        },
        {"rope_theta": 3e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_rope_settings_are_transformers(keys, tmp_path):
    """Also of a file with keys of both kinds, as one that was edited by a model card's advice."""
    save("llama 3", tmp_path)
    edit_config(tmp_path, **{"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ..., **keys})
    found = rope_settings(read_config(tmp_path))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["gemma", "gemma2", "qwen2 tied"])
def test_copy_of_a_tied_head_is_accepted(tmp_path, name):
    save(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    torch.save({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "head.bin")
    base = HuggingFaceFolder(str(tmp_path), ["head.bin"])
    base.check_model(FAMILIES[name].build(), FAMILIES[name].component)


@pytest.mark.parametrize(("name", "expected"), [("gemma", True), ("gemma2", True), ("qwen2", False)])
def test_tied_embeddings_by_default(tmp_path, name, expected):
    """Google's own config.json of Gemma does not say that embeddings are tied."""
    save(name, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=...)
    base, _ = load(name, tmp_path)
    assert ("tie_word_embeddings" in base.config, is_tied(base.config)) == (False, expected)


@pytest.mark.parametrize(
    ("name", "rope", "message"),
    [
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, "scaling 'longrope'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "rotated fraction of each head 1, .* says 0.75"),
    ],
)
def test_rotary_embeddings_torchtune_lacks_are_refused(tmp_path, name, rope, message):
    save(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, rope_parameters={**config["rope_parameters"], **rope})
    with pytest.raises(UserError, match=message):
        check(name, tmp_path)


QWEN = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("mistral", {"sliding_window": 8}, 8),
        ("phi3", {"sliding_window": 8}, 8),
        ("phi3", {"sliding_window": None}, None),
        ("qwen2", {**QWEN, "max_window_layers": 1}, 8),
        ("qwen2", {**QWEN, "max_window_layers": 2}, None),
        ("qwen3", QWEN, None),  # from layer 28 on
        ("qwen3", {**QWEN, "max_window_layers": 0, "use_sliding_window": False}, None),
        ("qwen3", {**QWEN, "layer_types": ["sliding_attention", "full_attention"]}, 8),
        ("gemma2", {}, None),  # finch's model has it
        ("llama", {"sliding_window": 8}, None),  # which transformers' model has not
    ],
)
def test_window_is_known_where_only_transformers_has_it(tmp_path, name, changes, window):
    reference = save(name, tmp_path, **changes)
    tokens = torch.randint(0, VOCAB, (3, 24))
    with torch.no_grad():
        base, decoder = load(name, tmp_path)
        differs = (decoder(tokens) - reference(tokens).logits).abs().amax((0, 2)) > 2 * FAMILIES[name].atol
    assert not differs[:8].any()
    assert (base.window, bool(differs[8:].any())) == (window, window is not None)
    if "layer_types" not in changes:
        edit_config(tmp_path, layer_types=...)  # older files have none
        assert HuggingFaceFolder(str(tmp_path)).window == window


def test_default_window_is_transformers(tmp_path):
    save("mistral", tmp_path)
    edit_config(tmp_path, sliding_window=...)
    assert HuggingFaceFolder(str(tmp_path)).window == transformers.AutoConfig.from_pretrained(tmp_path).sliding_window


@pytest.mark.parametrize("name", ["qwen2", "gemma", "gemma2", "phi3"])
@pytest.mark.parametrize(
    ("weight", "tensor", "message"),
    [
        ("input_layernorm", None, r"there layers\.1\.sa_norm\.scale is missing, the model expects \[32\]"),
        ("input_layernorm", torch.zeros(31), r"sa_norm\.scale has shape \[31\], the model expects \[32\]"),
        ("rotary", torch.zeros(3), r"holds model\.layers\.1\.rotary\.weight of shape \[3\], which"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, name, weight, tensor, message):
    save(name, tmp_path)
    changed = {**load_file(tmp_path / "model.safetensors"), f"model.layers.1.{weight}.weight": tensor}
    torch.save({key: value for key, value in changed.items() if value is not None}, tmp_path / "changed.bin")
    with pytest.raises(UserError, match=message):
        HuggingFaceFolder(str(tmp_path), ["changed.bin"]).check_shapes(FAMILIES[name].build())


def test_incomplete_fused_weight_is_an_error(tmp_path):
    save("phi3", tmp_path / "base")
    base, decoder = load("phi3", tmp_path / "base")
    weights = [item for item in decoder.state_dict().items() if item[0] != "layers.1.mlp.w3.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.w1\.weight: stored together"):
        base.write(weights, tmp_path / "out", is_writer=True)
    assert not (tmp_path / "out").exists()


def test_torchtunes_gemma2_differs_and_is_refused(tmp_path):
    """Why finch has a builder of its own; this test fails once torchtune's agrees."""
    reference = save("gemma2", tmp_path)
    decoder = torchtune_gemma2(**FAMILIES["gemma2"].arguments)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "dim": 32, "head_dim": 16}
    weights = torchtune_gemma2_weights.gemma2_hf_to_tune(load_file(tmp_path / "model.safetensors"), **sizes)
    decoder.load_state_dict(weights)
    tokens = torch.randint(0, VOCAB, (1, 5))
    with torch.no_grad():
        assert (decoder(tokens) - reference(tokens).logits).abs().max() > 1
    with pytest.raises(UserError, match=r"caps logits; give finch\.models\.gemma2\.gemma2, which is correct"):
        HuggingFaceFolder(str(tmp_path)).check_model(decoder, "torchtune.models.gemma2.gemma2")


def test_torchtunes_phi4_is_refused(tmp_path):
    save("phi3", tmp_path)
    decoder = FAMILIES["phi3"].build(rope_base=10000)
    with pytest.raises(UserError, match=r"rope base 10000, .* says 20000; give finch\.models\.phi4\.phi4_14b"):
        HuggingFaceFolder(str(tmp_path)).check_model(decoder, "torchtune.models.phi4.phi4_14b")


@pytest.mark.parametrize(
    ("builder", "parameters"),
    # as the published safetensors hold them
    [
        ("gemma2.gemma2_2b", 2_614_341_888),
        ("gemma2.gemma2_9b", 9_241_705_984),
        ("gemma2.gemma2_27b", 27_227_128_320),
        ("phi4.phi4_14b", 14_659_507_200),
        *((f"qwen3.qwen3_{size}_{kind}", number) for size, number in QWEN3.items() for kind in ("base", "instruct")),
    ],
)
def test_number_of_parameters(builder, parameters):
    with torch.device("meta"):
        model = build({"_component_": f"finch.models.{builder}"}, "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_text_family_of_torchtune_is_known():
    from torchtune import models

    packages = {path.name for path in importlib.resources.files(models).iterdir() if (path / "__init__.py").is_file()}
    # Images, encoders, and a decoder that needs an image encoder.
    assert packages - {"clip", "flux", "t5", "llama3_2_vision"} <= set().union(
        *(family.packages for family in KNOWN_FAMILIES.values())
    )


@pytest.mark.parametrize("name", _WRONG_BUILDERS)
def test_known_bad_builder_is_replaced(name):
    torchtune_name, finch_name = f"torchtune.models.{name}", f"finch.models.{name}"
    node, message = replace_known_bad_builder(OmegaConf.create({"_component_": torchtune_name}))
    assert node["_component_"] == finch_name
    assert re.fullmatch(rf"model: {torchtune_name} .*; {finch_name} takes its place", message)
    stock, fixed = (inspect.signature(locate(path, "model")) for path in (torchtune_name, finch_name))
    assert set(stock.parameters) <= set(fixed.parameters)
    with torch.device("meta"):
        stock, fixed = (build({"_component_": path}, "model") for path in (torchtune_name, finch_name))
    assert sorted(weight.shape for weight in stock.parameters()) == sorted(
        weight.shape for weight in fixed.parameters()
    )


def test_other_builders_are_kept():
    node = OmegaConf.create({"_component_": "torchtune.models.gemma.gemma_2b", "x": 1})
    assert replace_known_bad_builder(node) == (node, None)
