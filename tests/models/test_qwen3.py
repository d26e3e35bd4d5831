"""What only Qwen3's builders have, with and without LoRA; test_families.py compares them with transformers."""

from __future__ import annotations

import pytest
import torch
from helpers.models import FAMILIES
from torch import nn

from finch.errors import UserError
from finch.models import qwen3 as family
from finch.models.lora import adapter_layers, adapter_parameters, initialize_adapters
from finch.models.qwen3 import lora_qwen3, qwen3


def test_packed_positions_equal_separate_rows():
    decoder = FAMILIES["qwen3"].build().eval()
    tokens = torch.randint(0, 96, (1, 10))
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[0, :4, :4], mask[0, 4:, 4:] = torch.ones(4, 4).tril().bool(), torch.ones(6, 6).tril().bool()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed = decoder(tokens, mask=mask, input_pos=positions)
        torch.testing.assert_close(packed[:, :4], decoder(tokens[:, :4]), rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 4:], decoder(tokens[:, 4:]), rtol=0, atol=1e-5)


SIZE = FAMILIES["qwen3"].arguments
ALL = ["q_proj", "k_proj", "v_proj", "output_proj"]
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_untrained_adapters_change_nothing(tied, use_dora):
    plain = qwen3(**SIZE, tie_word_embeddings=tied)
    with torch.device("meta"):
        adapted = lora_qwen3(ALL, True, not tied, **SIZE, tie_word_embeddings=tied, **LORA, use_dora=use_dora)
    adapted.to_empty(device="cpu")
    for layer in adapted.layers:
        layer.attn.pos_embeddings.rope_init()
    stored = adapted.state_dict(keep_vars=True)
    assert stored.keys() - adapter_parameters(adapted).keys() == plain.state_dict().keys()
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            stored[name].copy_(tensor)
    initialize_adapters(adapted, seed=0)
    tokens = torch.randint(0, 96, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens), plain(tokens), rtol=0, atol=1e-6 if use_dora else 0)
        nn.init.ones_(adapted.layers[1].mlp.w2.lora_b.weight)
        assert (adapted(tokens) - plain(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((["q_proj", "v_proj"],), {"attn.q_proj", "attn.v_proj"}),
        ((["output_proj"], True), {"attn.output_proj", "mlp.w1", "mlp.w2", "mlp.w3"}),
        (([], True), {"mlp.w1", "mlp.w2", "mlp.w3"}),
        ((["k_proj"], False, True), {"attn.k_proj", "output"}),
    ],
)
def test_lora_is_on_the_layers_named(arguments, expected):
    layers = adapter_layers(lora_qwen3(*arguments, **SIZE, **LORA))
    assert {name.removeprefix("layers.0.").removeprefix("layers.1.") for name in layers} == expected
    assert len(layers) == sum(1 if name == "output" else 2 for name in expected)
    assert {(layer.rank, layer.alpha) for layer in layers.values()} == {(4, 8)}


@pytest.mark.parametrize(
    ("name", "millions"),
    # the parameters of the models as published; tied embeddings counted once
    [("0_6b", 596), ("1_7b", 1721), ("4b", 4022), ("8b", 8191)],
)
@pytest.mark.parametrize("kind", ["base", "instruct"])
def test_number_of_parameters(name, kind, millions):
    with torch.device("meta"):
        plain = getattr(family, f"qwen3_{name}_{kind}")()
        adapted = getattr(family, f"lora_qwen3_{name}_{kind}")(
            lora_attn_modules=ALL, apply_lora_to_mlp=True, apply_lora_to_output=False, lora_rank=64, lora_alpha=64
        )
    assert round(sum(parameter.numel() for parameter in plain.parameters()) / 1e6) == millions
    assert adapted.max_seq_len == plain.max_seq_len == {"base": 32768, "instruct": 40960}[kind]
    adapters = {name: parameter.shape for name, parameter in adapted.named_parameters() if ".lora_" in name}
    shapes = {name: parameter.shape for name, parameter in adapted.named_parameters() if name not in adapters}
    assert shapes == {name: parameter.shape for name, parameter in plain.named_parameters()}
    linear = [module for module in plain.layers.modules() if isinstance(module, nn.Linear)]
    assert sum(map(torch.Size.numel, adapters.values())) == 64 * sum(sum(layer.weight.shape) for layer in linear)


def test_settings_of_later_releases_and_torchtunes_defaults():
    with torch.device("meta"):
        model = family.lora_qwen3_4b_instruct(["q_proj"], max_seq_len=262144, rope_base=5e6)
    attention = model.layers[0].attn
    assert (attention.pos_embeddings.base, model.max_seq_len) == (5e6, 262144)
    assert (attention.q_proj.rank, attention.q_proj.alpha) == (8, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_attn_modules": ["q_proj", "o_proj"]}, r"names o_proj; .* q_proj, k_proj, v_proj, output_proj"),
        ({"apply_lora_to_output": True, "tie_word_embeddings": True}, "apply_lora_to_output=True is not possible"),
        ({"quantize_base": True}, "model.quantize_base=True .QLoRA. is not supported"),
    ],
)
def test_unsupported_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        lora_qwen3(**{"lora_attn_modules": ALL, **SIZE, **LORA, **change})


def test_unknown_option_is_refused():
    with torch.device("meta"), pytest.raises(TypeError, match="lora_ranks"):
        family.lora_qwen3_0_6b_base(ALL, lora_ranks=8)
