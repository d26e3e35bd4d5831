"""The decoder with its loss inside, against torchtune's logits and torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from helpers.runs import llama_args
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_2 import llama3_2

from finch.training.chunked_loss import TokenLoss


@pytest.mark.parametrize("num_chunks", [1, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("at_targets", [False, True])
def test_token_loss_equals_cross_entropy(num_chunks, tied, at_targets):
    torch.manual_seed(0)
    size = llama_args()
    make = (lambda: llama3_2(**size, tie_word_embeddings=True)) if tied else (lambda: llama2(**size))
    reference, decoder = make(), make()
    decoder.load_state_dict(reference.state_dict())
    tokens, labels = torch.randint(0, 64, (3, 19)), torch.randint(0, 64, (3, 19))
    labels[0, :7], labels[2] = -100, -100

    expected = F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten(), reduction="none").view(3, 19)
    targets = (labels.flatten() != -100).nonzero().squeeze(1) if at_targets else None
    found = TokenLoss(decoder, num_chunks)(tokens, labels, targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found[2].abs().sum() == 0

    expected.sum().backward()
    found.sum().backward()
    for (name, one), other in zip(decoder.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_token_loss_without_targets_has_a_graph():
    """One rank's backward would fail otherwise, and the others wait."""
    decoder = llama2(**llama_args())
    tokens, labels = torch.randint(0, 64, (2, 5)), torch.full((2, 5), -100)
    found = TokenLoss(decoder, num_chunks=8)(tokens, labels, torch.empty(0, dtype=torch.long))
    assert found.shape == (2, 5)
    found.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() == 0 for parameter in decoder.parameters())


def test_token_loss_is_fp32_for_bf16_and_fp64_for_fp64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = TokenLoss(llama2(**llama_args()).to(dtype))
        assert model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).dtype == expected


def test_token_loss_in_chunks_keeps_no_logits():
    """What autograd keeps: with one piece the logits of all tokens, with more none of them; the gradients are the same."""
    torch.manual_seed(0)
    size = {**llama_args(), "vocab_size": 61}  # a number that nothing else has
    decoder = llama2(**size)
    tokens, labels = torch.randint(0, 61, (3, 19)), torch.randint(0, 61, (3, 19))
    kept, gradients = {}, {}
    for num_chunks in (1, 4):
        model = TokenLoss(decoder, num_chunks)
        shapes = []

        def pack(tensor, shapes=shapes):
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = model(tokens, labels)
        kept[num_chunks] = [shape for shape in shapes if shape[-1:] == (61,) and shape != (32, 61)]  # not the weight
        decoder.zero_grad()
        found.sum().backward()
        gradients[num_chunks] = [parameter.grad.clone() for parameter in decoder.parameters()]
    assert kept[1]
    assert not kept[4]
    for one, other in zip(gradients[1], gradients[4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_token_loss_returns_top_logits(num_chunks):
    torch.manual_seed(0)
    decoder = llama2(**llama_args())
    tokens, labels = torch.randint(0, 64, (2, 9)), torch.randint(0, 64, (2, 9))
    labels[0, :4] = -100
    expected = decoder(tokens).topk(20).values.detach()
    targets = (labels.flatten() != -100).nonzero().squeeze(1)
    losses, top = TokenLoss(decoder, num_chunks)(tokens, labels, targets, num_top_logits=20)
    assert losses.requires_grad
    assert not top.requires_grad
    torch.testing.assert_close(top[labels != -100], expected[labels != -100], rtol=0, atol=1e-5)
    assert (top[labels == -100] == 0).all()
