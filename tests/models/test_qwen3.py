"""What only Qwen3's builders have, with and without LoRA; test_families.py compares them with transformers."""

import pytest
import torch
from helpers.models import FAMILIES

from finch.errors import UserError
from finch.models import qwen3 as family
from finch.models.lora import adapter_layers, adapter_parameters
from finch.models.qwen3 import lora_qwen3

SIZE = FAMILIES["qwen3"].arguments
ALL = ["q_proj", "k_proj", "v_proj", "output_proj"]
LORA = {"lora_rank": 4, "lora_alpha": 8}


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


@pytest.mark.parametrize("size", ["0_6b", "1_7b", "4b", "8b"])
@pytest.mark.parametrize(("kind", "context"), [("base", 32768), ("instruct", 40960)])
def test_lora_builder_has_the_plain_ones_weights(size, kind, context):
    with torch.device("meta"):
        plain = getattr(family, f"qwen3_{size}_{kind}")()
        adapted = getattr(family, f"lora_qwen3_{size}_{kind}")(ALL, apply_lora_to_mlp=True)
    assert adapted.max_seq_len == plain.max_seq_len == context
    adapters = adapter_parameters(adapted)
    shapes = {name: weight.shape for name, weight in adapted.named_parameters() if name not in adapters}
    assert shapes == {name: weight.shape for name, weight in plain.named_parameters()}


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
