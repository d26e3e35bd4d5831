"""The decoder with its loss inside, against torchtune's logits and torch's cross-entropy."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.runs import llama_args
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.llama3_2 import llama3_2

from finch.objectives import DFT, CrossEntropy
from finch.training import chunked_loss, readouts
from finch.training.chunked_loss import TokenLoss


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The few logits of these models are more than what is kept."""
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 61 * 15)


@pytest.mark.parametrize(("num_tokens", "expected"), [(441, 1), (442, 2), (3_000, 7), (16_384, 38)])
def test_chunks_of_logits_of_qwen3(num_tokens, expected, monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 2**28)
    assert chunked_loss.chunks_for(num_tokens, 151_936, 8) == expected
    assert chunked_loss.chunks_for(num_tokens, 151_936, 1) == 1
    with torch.no_grad():
        assert chunked_loss.chunks_for(num_tokens, 151_936, 1) == -(-num_tokens * 151_936 * 4 // 2**28)
    assert -(-num_tokens // expected) * 151_936 * 4 <= 1.01 * 2**28


@pytest.mark.parametrize("num_chunks", [1, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("at_targets", [False, True])
def test_token_loss_equals_cross_entropy(num_chunks, tied, at_targets):
    torch.manual_seed(0)
    make = partial(llama3_2, tie_word_embeddings=True) if tied else llama2
    reference, decoder = make(**llama_args()), make(**llama_args())
    decoder.load_state_dict(reference.state_dict())
    batch = targets_of_a_batch()
    tokens, labels = batch["tokens"], batch["labels"]
    expected = F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten(), reduction="none").view(3, 19)
    if not at_targets:
        del batch["targets"]
    found = TokenLoss(decoder, num_chunks)(batch)["loss"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found[2].abs().sum() == 0

    expected.sum().backward()
    found.sum().backward()
    for (name, one), other in zip(decoder.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_token_loss_without_targets_has_a_graph():
    """One rank's backward would fail otherwise, and the others wait."""
    decoder = llama2(**llama_args())
    batch = {"tokens": torch.randint(0, 64, (2, 5)), "labels": torch.full((2, 5), -100)}
    batch["targets"] = torch.empty(0, dtype=torch.long)
    TokenLoss(decoder, num_chunks=8)(batch)["loss"].sum().backward()
    assert not any(parameter.grad.any() for parameter in decoder.parameters())


def test_token_loss_is_fp32_for_bf16_and_fp64_for_fp64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = TokenLoss(llama2(**llama_args()).to(dtype))
        assert model(dict.fromkeys(("tokens", "labels"), torch.zeros(1, 4, dtype=torch.long)))["loss"].dtype == expected


@pytest.mark.parametrize("kind", ["loss", "kl", "cached kl"])
def test_chunks_keep_no_logits(kind):
    """What autograd keeps: with one piece the logits of all tokens, with more none of them."""
    size = {**llama_args(), "vocab_size": 61}  # a number that nothing else has
    decoder, reference = llama2(**size), llama2(**size).requires_grad_(False)
    batch = {"tokens": torch.randint(0, 61, (3, 19)), "labels": torch.randint(0, 61, (3, 19))}
    batch["targets"] = torch.arange(57)
    cached = readouts.kl_from(torch.full((57, 4), 0.25).log(), torch.arange(3).expand(57, 3))
    for num_chunks in (1, 4):
        model, shapes = TokenLoss(decoder, num_chunks, reference if kind == "kl" else None), []

        def pack(tensor, shapes=shapes):
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch, {"loss": [], "kl": [readouts.kl_from_pretrained(model)], "cached kl": [cached]}[kind])
        kept = [shape for shape in shapes if shape[-1:] == (61,) and shape != (32, 61)]  # not the weight
        assert bool(kept) == (num_chunks == 1)


def test_replayed_rows_leave_the_task_s_losses_as_they_are():
    """Also in a pass that reads nothing of them, such as the one that TALR's exact median takes."""
    model, batch = TokenLoss(llama2(**llama_args()), 4), targets_of_a_batch()
    replayed = torch.randint(0, 64, (2, 19))
    both = {**batch, "tokens": torch.cat([batch["tokens"], replayed]), "replay_targets": torch.tensor([60, 80])}
    torch.testing.assert_close(model(both)["loss"], model(batch)["loss"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_token_loss_returns_top_logits(num_chunks):
    decoder = llama2(**llama_args())
    batch = targets_of_a_batch()
    expected = decoder(batch["tokens"]).topk(20).values.detach()
    outputs = TokenLoss(decoder, num_chunks)(batch, [readouts.top_logits(20)])
    assert outputs["loss"].requires_grad
    expected[batch["labels"] == -100] = 0
    torch.testing.assert_close(outputs["top_logits"], expected, rtol=0, atol=1e-5)
    assert not outputs["top_logits"].requires_grad


def two_decoders(make=llama2, **size):
    """A pretrained model and one that has been tuned, in float64."""
    torch.manual_seed(0)
    pretrained, decoder = (make(**llama_args(), **size).double() for _ in range(2))
    decoder.load_state_dict(pretrained.state_dict())
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return pretrained, decoder


def logits_of(decoder, tokens):
    """In the model's dtype; torchtune's decoders return fp32."""
    decoder.unembed = lambda hidden: decoder.output(decoder.norm(hidden))
    return decoder(tokens)


def targets_of_a_batch():
    tokens, labels = torch.randint(0, 64, (3, 19)), torch.randint(0, 64, (3, 19))
    labels[0, :7], labels[2] = -100, -100
    return {"tokens": tokens, "labels": labels, "targets": (labels.flatten() != -100).nonzero().squeeze(1)}


def anchored_loss(logits, reference_logits, labels, *, is_dft, strength):
    """The mean over target tokens of (p detached or 1) * cross-entropy + strength * KL, in a few lines of torch."""
    is_target = labels.flatten() != -100
    logits, reference_logits = logits.flatten(0, 1)[is_target], reference_logits.flatten(0, 1)[is_target].detach()
    losses = F.cross_entropy(logits, labels.flatten()[is_target], reduction="none")
    weights = torch.exp(-losses).detach() if is_dft else 1.0
    divergence = F.kl_div(F.log_softmax(logits, -1), F.softmax(reference_logits, -1), reduction="none").sum(-1)
    return (weights * losses + strength * divergence).mean(), divergence


@pytest.mark.parametrize("is_dft", [False, True], ids=["kl", "asft"])
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_token_kl_objectives_equal_plain_torch(is_dft, num_chunks):
    """Loss, KL and the gradients of all weights, in float64."""
    pretrained, decoder = two_decoders()
    tokens, labels, targets = (batch := targets_of_a_batch()).values()
    expected, divergence = anchored_loss(
        logits_of(decoder, tokens), logits_of(pretrained, tokens), labels, is_dft=is_dft, strength=0.1
    )
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()

    model = TokenLoss(decoder, num_chunks, pretrained.requires_grad_(False))
    outputs = model(batch, [readouts.kl_from_pretrained(model)])
    weights = (DFT() if is_dft else CrossEntropy()).weights(outputs["loss"].detach(), {"labels": labels})
    loss = ((weights * outputs["loss"]).sum() + 0.1 * outputs["kl"].sum()) / len(targets)
    loss.backward()
    torch.testing.assert_close(outputs["kl"].flatten()[targets], divergence, rtol=0, atol=1e-12)
    assert (outputs["kl"][labels == -100] == 0).all()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12, msg=name)
    assert all(parameter.grad is None for parameter in pretrained.parameters())


def test_token_kl_from_cached_distributions():
    pretrained, decoder = two_decoders()
    batch, model = targets_of_a_batch(), TokenLoss(decoder, 4, pretrained)
    exact = model(batch, [readouts.kl_from_pretrained(model)])["kl"]
    with torch.no_grad():
        kept = TokenLoss(pretrained, 4)(batch, [readouts.top_tokens(llama_args()["vocab_size"])])
    reference = (kept[name].flatten(0, 1)[batch["targets"]] for name in ("top_log_probs", "top_tokens"))
    cached = TokenLoss(decoder, 4)(batch, [readouts.kl_from(*reference)])["kl"]
    torch.testing.assert_close(cached, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_output_layer", [False, True])
def test_token_kl_with_adapters_needs_no_second_model(in_output_layer):
    """The decoder without its adapters is the pretrained model, its dropout off; afterwards they are on again."""
    lora = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    make = partial(lora_llama2, **lora, apply_lora_to_output=in_output_layer)
    _, decoder = two_decoders(make)
    pretrained = llama2(**llama_args()).double()
    pretrained.load_state_dict({name: decoder.state_dict()[name] for name in pretrained.state_dict()})
    tokens, labels, targets = (batch := targets_of_a_batch()).values()
    _, expected = anchored_loss(
        logits_of(decoder, tokens), logits_of(pretrained, tokens), labels, is_dft=False, strength=0.1
    )
    model = TokenLoss(decoder, 4)
    for _ in range(2):
        outputs = model(batch, [readouts.kl_from_pretrained(model)])
        torch.testing.assert_close(outputs["kl"].flatten()[targets], expected, rtol=0, atol=1e-12)
    assert expected.min() > 1e-4
    assert decoder.training
