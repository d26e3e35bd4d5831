"""LoRA layers: what is trained, initial values, merged weights, on one process and on two ranks."""

import json

import pytest
import torch
from helpers.models import FAMILIES, save
from helpers.ranks import on_ranks
from safetensors.torch import load_file
from torchtune import training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import get_adapter_params

from finch.base import dtensor
from finch.base.errors import UserError
from finch.distributed import fsdp, parallel
from finch.models import qwen3
from finch.models.lora import (
    adapter_layers,
    adapter_parameters,
    check_lora_settings,
    initialize_adapters,
    merged,
    train_adapters_only,
)
from finch.weights.huggingface import HuggingFaceFolder
from finch.weights.peft import PeftFolder

ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
LLAMA = {"vocab_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "max_seq_len": 16}
LLAMA |= {"intermediate_dim": 24}
COMPONENT = "torchtune.models.llama3.llama3"
SIZE = FAMILIES["qwen3"].arguments


def small(use_dora=False, **changes):
    settings = {"lora_rank": 4, "lora_alpha": 6, "use_dora": use_dora, **LLAMA, **changes}
    return lora_llama3(ATTENTION, apply_lora_to_mlp=True, apply_lora_to_output=True, **settings)


def randomized(decoder):
    """Sharded or not, the same values."""
    torch.manual_seed(1)
    initialize_adapters(decoder, seed=0)
    for parameter in adapter_parameters(decoder).values():
        dtensor.load_full_tensor(parameter, torch.randn(parameter.shape) / 4)
    return decoder


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_alone_are_trained(use_dora):
    decoder = small(use_dora)
    expected = get_adapter_params(decoder)  # torchtune's
    training.set_activation_checkpointing(decoder, auto_wrap_policy={TransformerSelfAttentionLayer})
    train_adapters_only(decoder, COMPONENT)
    parameters = adapter_parameters(decoder)
    assert {name: id(parameter) for name, parameter in parameters.items()} == {n: id(p) for n, p in expected.items()}
    assert len(parameters) == 8 * (3 if use_dora else 2)
    assert {id(p) for p in decoder.parameters() if p.requires_grad} == {id(p) for p in parameters.values()}
    assert parameters.keys() <= decoder.state_dict().keys()


def test_lora_a_is_uniform_and_b_zero():
    decoder = small(num_heads=8, embed_dim=512, lora_rank=32)
    initialize_adapters(decoder, seed=5)
    for layer in adapter_layers(decoder.layers[0].attn).values():
        a, bound = layer.lora_a.weight.detach(), 512**-0.5
        assert 0.999 * bound < a.abs().max() <= bound
        assert abs(float(a.std()) / (bound / 3**0.5) - 1) < 0.02
        assert not layer.lora_b.weight.any()


def test_lora_a_depends_on_seed_and_layer_alone():
    initial = {}
    decoders = {"once": small(), "again": small(num_layers=2), "other seed": small(), "bf16": small().bfloat16()}
    for key, decoder in decoders.items():
        torch.manual_seed(len(initial))
        initialize_adapters(decoder, seed=1 if key == "other seed" else 0)
        attention = decoder.layers[0].attn
        initial[key] = attention.q_proj.lora_a.weight, attention.k_proj.lora_a.weight
    q, k = initial["once"]
    assert torch.equal(q, initial["again"][0])
    assert torch.equal(q.bfloat16(), initial["bf16"][0])
    assert not torch.equal(q, k)
    assert not torch.equal(q, initial["other seed"][0])


@pytest.mark.parametrize("use_dora", [False, True])
def test_merged_weights_give_the_same_logits(use_dora):
    decoder = randomized(small(use_dora)).double()
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    plain = llama3(**LLAMA).double()
    plain.load_state_dict(dict(merged(decoder)))
    tokens = torch.randint(0, 32, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens), decoder(tokens), rtol=0, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())


def test_bf16_sums_are_rounded_once():
    decoder = randomized(small()).bfloat16()
    layer = decoder.layers[0].mlp.w1
    w, a, b = (tensor.weight.detach().double() for tensor in (layer, layer.lora_a, layer.lora_b))
    exact = w + 1.5 * b @ a
    name = "layers.0.mlp.w1.weight"
    assert dict(merged(decoder, torch.float32))[name].dtype == torch.float32
    torch.testing.assert_close(dict(merged(decoder, torch.float32))[name].double(), exact, rtol=0, atol=1e-6)
    assert torch.equal(dict(merged(decoder))[name], exact.float().bfloat16())
    twice = layer.weight + (1.5 * layer.lora_b.weight @ layer.lora_a.weight)
    assert not torch.equal(twice, exact.float().bfloat16())


def initialize_and_write(folder, ranks):
    """Initializes, then with random adapters writes both folders. Returns the adapters' initial values."""
    with torch.device("meta"):
        decoder = qwen3.lora_qwen3(["q_proj", "output_proj"], True, **SIZE, lora_rank=5, lora_alpha=7, use_dora=True)
    train_adapters_only(decoder, COMPONENT)
    base = HuggingFaceFolder(str(folder / "base"))
    peft = PeftFolder(decoder, base)
    fsdp.shard_model(decoder, decoder.layers, ranks)
    decoder.to_empty(device="cpu")
    decoder.layers[0].attn.pos_embeddings.rope_init()
    stored = decoder.state_dict(keep_vars=True)
    for name, tensor in base.weights():
        dtensor.load_full_tensor(stored[name], tensor)
    initialize_adapters(decoder, seed=3)
    adapters = adapter_parameters(decoder)
    initial = {name: dtensor.full_tensor(parameter.detach()).flatten().tolist() for name, parameter in adapters.items()}
    randomized(decoder)
    out = folder / f"of_{ranks.world_size}"
    peft.write(decoder, out / "adapter", is_writer=ranks.is_rank_zero)
    base.write(merged(decoder), out / "merged", is_writer=ranks.is_rank_zero)
    decoder(torch.arange(8).reshape(1, 8)).square().mean().backward()
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad is not None) == (name in adapters), name
    return initial


def test_lora_on_two_ranks_equals_one(tmp_path):
    save("qwen3", tmp_path / "base")
    alone = initialize_and_write(tmp_path, parallel.start(torch.device("cpu"), shard=False))
    code = """
        from finch.distributed import parallel
        from models.test_lora import initialize_and_write
        ranks = parallel.start(device, shard=False)
        tell([ranks.world_size, initialize_and_write(folder, ranks)])
        parallel.stop()
    """
    # Magnitudes are norms of unsharded rows: they are the same bits as well.
    assert on_ranks(2, code, tmp_path) == [[2, alone], [2, alone]]
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        one, two = (load_file(tmp_path / f"of_{ranks}" / file) for ranks in (1, 2))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    configs = [(tmp_path / f"of_{ranks}/adapter/adapter_config.json").read_text() for ranks in (1, 2)]
    assert configs[0] == configs[1]
    assert json.loads(configs[0])["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"lora_attn_modules": ["q_proj", "o_proj"]}, "names o_proj; torchtune's names are q_proj, k_proj"),
        ({"lora_attn_modules": "q_proj"}, "lora_attn_modules=q_proj must be a list"),
        ({"lora_attn_modules": ATTENTION, "quantize_base": True}, "model.quantize_base=True .QLoRA. is not supported"),
        ({"_component_": "torchtune.models.llama3.qlora_llama3_8b"}, "; give torchtune.models.llama3.lora_llama3_8b$"),
    ],
)
def test_unsupported_settings_are_refused(block, message):
    check_lora_settings({"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ATTENTION})
    with pytest.raises(UserError, match=message):
        check_lora_settings(block)


def test_model_without_lora_is_refused():
    with pytest.raises(UserError, match=rf"model._component_={COMPONENT} builds no LoRA layers; .*llama3.lora_llama3,"):
        train_adapters_only(llama3(**LLAMA), COMPONENT)
    nothing = qwen3.lora_qwen3([], **SIZE, lora_rank=4, lora_alpha=4)
    with pytest.raises(UserError, match=r"lora_qwen3 puts LoRA on no layer; set model.lora_attn_modules="):
        train_adapters_only(nothing, "finch.models.qwen3.lora_qwen3")


# Qwen3's builders; test_families.py compares the plain ones with transformers.


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
    layers = adapter_layers(qwen3.lora_qwen3(*arguments, **SIZE, lora_rank=4, lora_alpha=8))
    assert {name.removeprefix("layers.0.").removeprefix("layers.1.") for name in layers} == expected
    assert len(layers) == sum(1 if name == "output" else 2 for name in expected)
    assert {(layer.rank, layer.alpha) for layer in layers.values()} == {(4, 8)}


@pytest.mark.parametrize("size", ["0_6b", "1_7b", "4b", "8b"])
@pytest.mark.parametrize(("kind", "context"), [("base", 32768), ("instruct", 40960)])
def test_lora_builder_has_the_plain_ones_weights(size, kind, context):
    with torch.device("meta"):
        plain = getattr(qwen3, f"qwen3_{size}_{kind}")()
        adapted = getattr(qwen3, f"lora_qwen3_{size}_{kind}")(ATTENTION, apply_lora_to_mlp=True)
    assert adapted.max_seq_len == plain.max_seq_len == context
    adapters = adapter_parameters(adapted)
    shapes = {name: weight.shape for name, weight in adapted.named_parameters() if name not in adapters}
    assert shapes == {name: weight.shape for name, weight in plain.named_parameters()}


def test_settings_of_later_releases_and_torchtunes_defaults():
    with torch.device("meta"):
        model = qwen3.lora_qwen3_4b_instruct(["q_proj"], max_seq_len=262144, rope_base=5e6)
    attention = model.layers[0].attn
    assert (attention.pos_embeddings.base, model.max_seq_len) == (5e6, 262144)
    assert (attention.q_proj.rank, attention.q_proj.alpha) == (8, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"apply_lora_to_output": True, "tie_word_embeddings": True}, "apply_lora_to_output=True is not possible"),
        ({"quantize_base": True}, "model.quantize_base=True .QLoRA. is not supported"),
    ],
)
def test_unsupported_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        qwen3.lora_qwen3(ATTENTION, **{**SIZE, "lora_rank": 4, "lora_alpha": 8, **change})
