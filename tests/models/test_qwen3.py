"""What Qwen3's builders have of their own; test_families.py compares them with transformers."""

import pytest
import torch
from helpers.models import FAMILIES

from finch.models import qwen3


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


@pytest.mark.parametrize(
    ("name", "millions"),
    # the parameters of the models as published; tied embeddings counted once
    [("0_6b", 596), ("1_7b", 1721), ("4b", 4022), ("8b", 8191)],
)
@pytest.mark.parametrize("kind", ["base", "instruct"])
def test_number_of_parameters(name, kind, millions):
    with torch.device("meta"):
        model = getattr(qwen3, f"qwen3_{name}_{kind}")()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert model.max_seq_len == {"base": 32768, "instruct": 40960}[kind]


def test_builders_take_the_settings_of_later_releases():
    with torch.device("meta"):
        model = qwen3.qwen3_4b_instruct(rope_base=5e6, max_seq_len=262144)
    assert (model.layers[0].attn.pos_embeddings.base, model.max_seq_len) == (5e6, 262144)
