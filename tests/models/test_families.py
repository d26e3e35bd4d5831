"""Every family that torchtune ships and finch converts, as a small random model, against transformers on the same files."""

import importlib
import json
import random

import pytest
import torch
import transformers
from helpers.models import FAMILIES, SIZE, VOCAB, load, save
from safetensors.torch import load_file
from torch import nn
from torchtune.models.gemma2 import _convert_weights as torchtune_gemma2_weights
from torchtune.models.gemma2 import gemma2 as torchtune_gemma2

from finch.errors import UserError
from finch.models import gemma2, phi4
from finch.training.token_loss import TokenLoss
from finch.weights.huggingface import HuggingFaceFolder


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_token_losses_and_gradients_equal_those_of_transformers(tmp_path, name):
    theirs = save(name, tmp_path)
    base, decoder = load(name, tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 21))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), theirs(tokens).logits, rtol=0, atol=2e-5)

    labels = torch.roll(tokens, -1, dims=1)
    labels[0, :9], labels[:, -1] = -100, -100
    expected = nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    targets = (labels.flatten() != -100).nonzero().squeeze(1)
    found = TokenLoss(decoder, num_chunks=3)(tokens, labels, targets)
    torch.testing.assert_close(found, expected.view_as(labels), rtol=0, atol=2e-5)
    found.mean().backward()
    expected.mean().backward()
    # Renaming, permuting and splitting are linear, so that gradients convert as weights do.
    gradients = base._to_torchtune({key: parameter.grad for key, parameter in theirs.named_parameters()})
    parameters = dict(decoder.named_parameters())
    assert gradients.keys() == parameters.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(parameters[key].grad, gradient, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_what_was_read(tmp_path, name):
    theirs = save(name, tmp_path / "base")
    base, decoder = load(name, tmp_path / "base")
    weights = list(decoder.state_dict().items())
    random.Random(0).shuffle(weights)  # one at a time, in any order
    base.write(weights, tmp_path / "out", is_writer=True)
    original, written = (load_file(tmp_path / place / "model.safetensors") for place in ("base", "out"))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, VOCAB, (1, 20))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_another_familys_builder_is_named(tmp_path, name):
    save(name, tmp_path)
    base, family = HuggingFaceFolder(str(tmp_path)), FAMILIES[name]
    other = FAMILIES["gemma" if family.architecture == "Llama" else "llama"]
    with pytest.raises(
        UserError, match=rf"holds a {base.config['model_type']} model .{family.architecture}ForCausalLM."
    ):
        base.check_model(other.build(), other.component)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        *((name, {"rope_base": 30000}, "rope base 30000, .* says 20000") for name in FAMILIES),
        *((name, {"norm_eps": 1e-6}, "norm epsilon 1e-06") for name in FAMILIES),
        ("gemma2", {"hidden_capping_value": 4.0}, "attn_logit_softcapping .0: none. 4, .* says 5"),
        ("gemma2", {"final_capping_value": 4.0}, "final_logit_softcapping .0: none. 4, .* says 3"),
        ("gemma2", {"sliding_window_size": 5}, "sliding_window .0: none. 5, .* says 6"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query scale 0.25, .* says 0.204"),
        ("gemma2", {"num_kv_heads": 4, "head_dim": 8, "num_heads": 8}, "number of attention heads 8"),
        ("qwen2", {"tie_word_embeddings": True}, "tied embeddings .* 1, .* says 0"),
        ("qwen2 tied", {"tie_word_embeddings": False}, "tied embeddings .* 0, .* says 1"),
    ],
)
def test_settings_that_shapes_do_not_show_are_compared(tmp_path, name, change, told):
    save(name, tmp_path)
    with pytest.raises(UserError, match=told):
        HuggingFaceFolder(str(tmp_path)).check_model(FAMILIES[name].build(**change), FAMILIES[name].component)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "qwen2 tied"])
def test_a_tied_head_that_a_folder_stores_all_the_same(tmp_path, name):
    save(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    torch.save({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "head.bin")
    base = HuggingFaceFolder(str(tmp_path), ["head.bin"])
    base.check_model(FAMILIES[name].build(), FAMILIES[name].component)


def test_a_folder_that_leaves_out_what_gemma_always_has(tmp_path):
    """Google's own config.json does not say that embeddings are tied."""
    save("gemma", tmp_path)
    edit(tmp_path, tie_word_embeddings=...)
    load("gemma", tmp_path)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, "rope scaling 'longrope'"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.75}, "rotated fraction of each head 1, .* says 0.75"),
    ],
)
def test_rotary_embeddings_that_phi3_does_not_have_here(tmp_path, rope, told):
    save("phi3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, rope_parameters={**config["rope_parameters"], **rope})
    with pytest.raises(UserError, match=told):
        load("phi3", tmp_path)


def test_a_window_that_the_model_does_not_have_is_told(tmp_path, caplog):
    save("phi3", tmp_path)
    edit(tmp_path, sliding_window=64)  # as long as the longest row
    load("phi3", tmp_path)
    assert "limits attention" not in caplog.text
    edit(tmp_path, sliding_window=16)
    load("phi3", tmp_path)
    assert "limits attention to the last 16 tokens" in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "gemma", "gemma2", "phi3"])
@pytest.mark.parametrize("change", ["lacks", "holds", "shape"])
def test_weights_that_do_not_fit(tmp_path, name, change):
    save(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weight = "model.layers.1.input_layernorm.weight"
    if change == "lacks":
        del weights[weight]
    elif change == "shape":
        weights[weight] = torch.zeros(31)
    else:
        weights["model.layers.1.self_attn.rotary.weight"] = torch.zeros(3)
    torch.save(weights, tmp_path / "changed.bin")
    told = {
        "lacks": r"there layers\.1\.sa_norm\.scale is missing, the model expects \[32\]",
        "shape": r"there layers\.1\.sa_norm\.scale has shape \[31\], the model expects \[32\]",
        "holds": r"holds model\.layers\.1\.self_attn\.rotary\.weight of shape \[3\], which does not belong to the",
    }[change]
    with pytest.raises(UserError, match=told):
        HuggingFaceFolder(str(tmp_path), ["changed.bin"]).check_shapes(FAMILIES[name].build())


def test_a_fused_weight_whose_parts_do_not_come(tmp_path):
    save("phi3", tmp_path / "base")
    base, decoder = load("phi3", tmp_path / "base")
    weights = [item for item in decoder.state_dict().items() if item[0] != "layers.1.mlp.w3.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.w1\.weight: stored together"):
        base.write(weights, tmp_path / "out", is_writer=True)
    assert not (tmp_path / "out").exists()


def test_torchtunes_own_gemma2_is_another_function_and_refused(tmp_path):
    """Why finch has a builder of its own; should torchtune's agree one day, this test says so."""
    theirs = save("gemma2", tmp_path)
    family = FAMILIES["gemma2"]
    decoder = torchtune_gemma2(**SIZE, **family.ours)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "dim": 32, "head_dim": 16}
    weights = torchtune_gemma2_weights.gemma2_hf_to_tune(load_file(tmp_path / "model.safetensors"), **sizes)
    decoder.load_state_dict(weights)
    tokens = torch.randint(0, VOCAB, (1, 5))
    with torch.no_grad():
        assert (decoder(tokens) - theirs(tokens).logits).abs().max() > 1
    with pytest.raises(UserError, match=r"caps logits; give finch\.models\.gemma2\.gemma2, which is correct"):
        HuggingFaceFolder(str(tmp_path)).check_model(decoder, "torchtune.models.gemma2.gemma2")


def test_torchtunes_own_phi4_is_refused_with_the_builder_to_use(tmp_path):
    save("phi3", tmp_path)
    with pytest.raises(UserError, match=r"rope base 10000, .* says 20000; give finch\.models\.phi4\.phi4_14b"):
        HuggingFaceFolder(str(tmp_path)).check_model(
            FAMILIES["phi3"].build(rope_base=10000), "torchtune.models.phi4.phi4_14b"
        )


@pytest.mark.parametrize(
    ("builder", "parameters"),
    # as the published safetensors hold them
    [
        (gemma2.gemma2_2b, 2_614_341_888),
        (gemma2.gemma2_9b, 9_241_705_984),
        (gemma2.gemma2_27b, 27_227_128_320),
        (phi4.phi4_14b, 14_659_507_200),
    ],
)
def test_sizes(builder, parameters):
    with torch.device("meta"):
        model = builder()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_text_family_of_torchtune_is_known():
    from torchtune import models

    from finch.weights.validation import FAMILIES as KNOWN

    folders = {path.name for path in importlib.resources.files(models).iterdir() if (path / "__init__.py").is_file()}
    # Images, encoders, and a decoder that needs an image encoder.
    assert folders - {"clip", "flux", "t5", "llama3_2_vision"} <= {
        folder for names in KNOWN.values() for folder in names
    }


def edit(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
