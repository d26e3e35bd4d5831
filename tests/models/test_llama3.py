"""Small Llama-3 models against transformers, the rotary scaling of 3.1 and 3.2 included."""

import json

import pytest
import torch
from helpers.models import LLAMA3_SIZE as SIZE
from helpers.models import llama3_scaling as scaling
from helpers.models import save_llama3
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from transformers import AutoModelForCausalLM

from finch.errors import UserError
from finch.training.token_loss import TokenLoss
from finch.weights.huggingface import HuggingFaceFolder

# builder, its own arguments, transformers' rope scaling, tied
FAMILY = {
    "3": (llama3, {"rope_base": 5e5}, None, False),
    "3.1": (llama3_1, {"rope_base": 5e5}, scaling(8.0), False),
    "3.2": (llama3_2, {"rope_base": 5e5, "scale_factor": 32}, scaling(32.0), True),
}


def ours(name, folder):
    builder, arguments, _, _ = FAMILY[name]
    decoder = builder(**SIZE, **arguments)
    base = HuggingFaceFolder(str(folder))
    base.check_model(decoder, f"torchtune.models.llama3.{builder.__name__}")
    decoder.load_state_dict(dict(base.weights()))
    return decoder


@pytest.mark.parametrize("name", FAMILY)
def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path, name):
    theirs = save_llama3(tmp_path, *FAMILY[name][2:])
    decoder = ours(name, tmp_path)
    tokens = torch.randint(0, 96, (1, 400))  # long enough for the scaled frequencies to show
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    labels = torch.roll(tokens, -1, dims=1)
    labels[:, -1] = -100
    loss = TokenLoss(decoder)(tokens, labels).sum() / 399
    expected = theirs(tokens, labels=tokens).loss
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    loss.backward()
    expected.backward()
    # Renaming and permuting are linear, so that gradients convert as weights do.
    gradients = hf_to_tune(
        {name: parameter.grad for name, parameter in theirs.named_parameters()}, num_heads=4, num_kv_heads=2, dim=64
    )
    found = dict(decoder.named_parameters())
    assert gradients.keys() == found.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key].grad, gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", FAMILY)
def test_saved_and_loaded_back_by_transformers(tmp_path, name):
    theirs = save_llama3(tmp_path / "base", *FAMILY[name][2:])
    decoder = ours(name, tmp_path / "base")
    HuggingFaceFolder(str(tmp_path / "base")).write(decoder.state_dict().items(), tmp_path / "out", is_writer=True)
    tokens = torch.randint(0, 96, (1, 300))
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_a_builder_with_another_scaling_is_refused(tmp_path):
    save_llama3(tmp_path, scaling(8.0), False)
    base = HuggingFaceFolder(str(tmp_path))
    with pytest.raises(UserError, match=r"rope scaling .1: on. 0, config.json of .* says 1"):
        base.check_model(llama3(**SIZE, rope_base=5e5), "torchtune.models.llama3.llama3")
    with pytest.raises(UserError, match=r"rope scaling factor 32, .* says 8"):
        base.check_model(llama3_1(**SIZE, rope_base=5e5, scale_factor=32), "torchtune.models.llama3_1.llama3_1")


def test_the_older_form_of_config_json_says_the_same(tmp_path):
    save_llama3(tmp_path, scaling(8.0), False)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = settings.pop("rope_theta"), settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = HuggingFaceFolder(str(tmp_path))
    base.check_model(llama3_1(**SIZE, rope_base=5e5), "torchtune.models.llama3_1.llama3_1")
    with pytest.raises(UserError, match="rope base 10000"):
        base.check_model(llama3_1(**SIZE, rope_base=1e4), "torchtune.models.llama3_1.llama3_1")
