"""Qwen3 against transformers: logits, one step of training, the way out and back."""

import json

import pytest
import torch
from helpers.models import QWEN3_SIZE as SIZE
from helpers.models import save_qwen3
from transformers import AutoModelForCausalLM

from finch.errors import UserError
from finch.models import qwen3 as family
from finch.models.qwen3 import qwen3, qwen3_hf_to_tune, qwen3_tune_to_hf
from finch.training.token_loss import TokenLoss
from finch.weights.huggingface import HuggingFaceFolder


@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path, tied):
    theirs = save_qwen3(tmp_path, tied)
    folder = HuggingFaceFolder(str(tmp_path))
    decoder = qwen3(**SIZE, tie_word_embeddings=tied)
    folder.check_shapes(decoder)
    decoder.load_state_dict(dict(folder.weights()))
    tokens = torch.randint(0, 96, (3, 21))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)

    labels = torch.roll(tokens, -1, dims=1)
    labels[:, -1] = -100
    ours = TokenLoss(decoder)
    loss = ours(tokens, labels).sum() / (labels != -100).sum()
    expected = theirs(tokens, labels=tokens).loss
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    loss.backward()
    expected.backward()
    gradients = qwen3_hf_to_tune({name: parameter.grad for name, parameter in theirs.named_parameters()})
    found = dict(decoder.named_parameters())
    assert gradients.keys() == found.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name].grad, gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_after_a_step_saved_and_loaded_back_by_transformers(tmp_path, tied):
    """The same SGD step there and here; what is written here then has the logits of the model stepped there."""
    theirs = save_qwen3(tmp_path / "base", tied)
    folder = HuggingFaceFolder(str(tmp_path / "base"))
    decoder = qwen3(**SIZE, tie_word_embeddings=tied)
    decoder.load_state_dict(dict(folder.weights()))
    tokens = torch.randint(0, 96, (2, 17))
    labels = torch.roll(tokens, -1, dims=1)
    labels[:, -1] = -100
    model = TokenLoss(decoder)
    (model(tokens, labels).sum() / 32).backward()
    theirs(tokens, labels=tokens).loss.backward()
    for each in (model, theirs):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    folder.write(decoder.state_dict().items(), tmp_path / "out", is_writer=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)
        assert (again(tokens).logits - before(tokens).logits).abs().max() > 1e-2


def test_packed_positions_equal_separate_rows(tmp_path):
    decoder = qwen3(**SIZE).eval()
    tokens = torch.randint(0, 96, (1, 10))
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[0, :4, :4], mask[0, 4:, 4:] = torch.ones(4, 4).tril().bool(), torch.ones(6, 6).tril().bool()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed = decoder(tokens, mask=mask, input_pos=positions)
        torch.testing.assert_close(packed[:, :4], decoder(tokens[:, :4]), rtol=0, atol=1e-5)
        torch.testing.assert_close(packed[:, 4:], decoder(tokens[:, 4:]), rtol=0, atol=1e-5)


def test_renaming_and_back():
    decoder = qwen3(**SIZE)
    state = decoder.state_dict()
    back = qwen3_hf_to_tune(qwen3_tune_to_hf(state))
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state)


@pytest.mark.parametrize(
    ("name", "millions"),
    # the parameters of the models as published; tied embeddings counted once
    [("0_6b", 596), ("1_7b", 1721), ("4b", 4022), ("8b", 8191)],
)
@pytest.mark.parametrize("kind", ["base", "instruct"])
def test_sizes(name, kind, millions):
    with torch.device("meta"):
        model = getattr(family, f"qwen3_{name}_{kind}")()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert model.max_seq_len == {"base": 32768, "instruct": 40960}[kind]


def test_a_llama_builder_for_a_qwen3_folder_is_named(tmp_path):
    from torchtune.models.llama2 import llama2

    save_qwen3(tmp_path, tied=False)
    size = {key: value for key, value in SIZE.items() if key not in ("head_dim", "rope_base")}
    with pytest.raises(UserError, match=r"llama2 builds a llama2 model, but .* holds a qwen3 model .Qwen3ForCausalLM."):
        HuggingFaceFolder(str(tmp_path)).check_model(llama2(**size), "torchtune.models.llama2.llama2")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_base": 5e5}, "rope base 500000, .* says 10000"),
        ({"norm_eps": 1e-5}, "norm epsilon 1e-05"),
        ({"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}, "number of attention heads 2, config.json of .* says 4"),
    ],
)
def test_settings_that_shapes_do_not_show_are_compared(tmp_path, change, told):
    save_qwen3(tmp_path, tied=False)
    folder = HuggingFaceFolder(str(tmp_path))
    folder.check_model(qwen3(**SIZE), "finch.models.qwen3.qwen3")
    with pytest.raises(UserError, match=told):
        folder.check_model(qwen3(**{**SIZE, **change}), "finch.models.qwen3.qwen3")


def test_later_releases_of_a_size_have_other_settings():
    with torch.device("meta"):
        model = family.qwen3_4b_instruct(rope_base=5e6, max_seq_len=262144)
    assert (model.layers[0].attn.pos_embeddings.base, model.max_seq_len) == (5e6, 262144)


def test_a_rope_scaling_that_torchtune_lacks_is_refused(tmp_path):
    save_qwen3(tmp_path, tied=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"].update(rope_type="yarn", factor=4.0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has rope scaling 'yarn'"):
        HuggingFaceFolder(str(tmp_path)).check_model(qwen3(**SIZE), "finch.models.qwen3.qwen3")


def test_config_json_of_another_architecture(tmp_path):
    save_qwen3(tmp_path, tied=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    with pytest.raises(UserError, match="model of type 'qwen3_moe', which finch cannot convert"):
        HuggingFaceFolder(str(tmp_path))
