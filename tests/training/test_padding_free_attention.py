"""Losses and gradients without padding equal those of the padded batch."""

import pytest
import torch
from helpers.models import FAMILIES
from torch.utils.flop_counter import FlopCounterMode
from torchtune.modules import MultiHeadAttention

from finch.data.padding_free import remove_padding
from finch.training.chunked_loss import TokenLoss
from finch.training.padding_free_attention import accept_padding_free, choose_way

NAMES = ("llama", "llama 3", "mistral", "gemma", "gemma2", "phi3", "qwen2 tied", "qwen3 tied")
LENGTHS = (40, 27, 19, 33, 12)


def batch(prefix: int) -> dict[str, torch.Tensor]:
    """Five samples that share ``prefix`` tokens; the last has no target, the others predict part of the prefix as well."""
    generator = torch.Generator().manual_seed(prefix)
    tokens = torch.randint(5, 90, (len(LENGTHS), max(LENGTHS)), generator=generator)
    tokens[:, :prefix] = tokens[0, :prefix].clone()
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 0
        start = max(prefix - 2, 0) + row
        labels[row, start : length - 1] = tokens[row, start + 1 : length]
    labels[-1] = -100
    return {"tokens": tokens, "labels": labels, "targets": (labels.flatten() != -100).nonzero().squeeze(1)}


def model_of(name: str) -> TokenLoss:
    torch.manual_seed(0)
    model = TokenLoss(FAMILIES[name].build(max_seq_len=48))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def losses_and_gradient(model: TokenLoss, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    layout = remove_padding(inputs["tokens"], inputs["targets"])
    assert len(layout.indices) > model.decoder.max_seq_len  # without padding the one row may be longer than the context
    losses = model({**inputs, "layout": layout})["loss"]
    gradients = torch.autograd.grad((losses * losses).sum(), list(model.parameters()))
    return losses.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def way_of(model: TokenLoss, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: bool) -> str:
    options = {"padding_free": True, "compile": False} | options
    return choose_way(model.decoder, torch.device(device), dtype, **options)


@pytest.mark.parametrize("prefix", [0, 9])
@pytest.mark.parametrize("way", ["per sample", "one call"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_the_padded_batch(name: str, way: str, prefix: int) -> None:
    model, inputs = model_of(name), batch(prefix)
    losses, gradient = losses_and_gradient(model, inputs)
    with FlopCounterMode(display=False) as padded_flops:
        model(inputs)
    if name == "gemma2":
        assert way_of(model, compile=True) == "padded"
        way = "per sample"
    assert way_of(model, compile=way == "one call") == way
    model.way = way
    accept_padding_free(model.decoder, way)
    found, found_gradient = losses_and_gradient(model, inputs)
    assert (found - losses).norm() < 1e-6 * losses.norm()
    assert (found_gradient - gradient).norm() < 1e-6 * gradient.norm()
    if (
        name == "gemma2" or way == "one call"
    ):  # sees padding; its operations are counted, which torch does not do for a CPU's attention
        return
    with FlopCounterMode(display=False) as flops:
        model({**inputs, "layout": remove_padding(inputs["tokens"], inputs["targets"])})
    share = (sum(LENGTHS[:-1]) - 3 * prefix) / (len(LENGTHS) * max(LENGTHS))
    assert flops.get_total_flops() < 1.05 * share * padded_flops.get_total_flops()


def test_unknown_attention_keeps_padding() -> None:
    class OwnAttention(MultiHeadAttention):
        def forward(self, *inputs: torch.Tensor, **options: object) -> torch.Tensor:
            return super().forward(*inputs, **options)

    decoder = FAMILIES["llama"].build()
    decoder.layers[1].attn.__class__ = OwnAttention
    assert way_of(TokenLoss(decoder)) == "padded"


def test_way_follows_device_dtype_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3 tied")
    assert way_of(model, padding_free=False) == "padded"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert way_of(model, "cuda") == "per sample"  # in fp32 there is no such kernel
    assert way_of(model, "cuda", compile=True) == "padded"
    assert way_of(model, "cuda", torch.bfloat16) == way_of(model, "cuda", torch.bfloat16, compile=True) == "one call"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert way_of(model, "cuda", torch.float16) == "per sample"
    model.decoder.layers[0].attn.attn_dropout = 0.1
    assert way_of(model, compile=True) == "padded"
