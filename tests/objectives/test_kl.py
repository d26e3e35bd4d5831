"""The token KL: against torch's formula and autograd in float64, and its coarsened form against closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F

from finch.objectives.kl import KL, coarse_token_kl, token_kl, top_log_probs

VOCAB = 61


def two_logits(scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    return tuple((scale * torch.randn(7, VOCAB, **options)).to(dtype).requires_grad_() for _ in range(2))


def value_and_gradient(function, logits):
    weights = torch.linspace(-1, 2, len(logits), dtype=torch.float64)
    value = function(logits)
    (gradient,) = torch.autograd.grad((weights * value).sum(), logits)
    return value.detach(), gradient


def formula(logits, reference):
    return F.kl_div(F.log_softmax(logits, -1), F.softmax(reference, -1), reduction="none").sum(-1)


def coarse_formula(logits, reference, top_k):
    """Probabilities, the rest as 1 - their sum."""
    top = reference.topk(top_k).indices
    q, q0 = (each.softmax(-1).gather(-1, top) for each in (logits, reference))
    rest, rest0 = 1 - q.sum(-1), 1 - q0.sum(-1)
    return (q0 * (q0 / q).log()).sum(-1) + rest0 * (rest0 / rest).log()


def test_token_kl_equals_torch_and_autograd():
    logits, reference = two_logits()
    value, gradient = value_and_gradient(lambda logits: token_kl(logits, reference), logits)
    expected, expected_gradient = value_and_gradient(lambda logits: formula(logits, reference.detach()), logits)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    assert value.min() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_kl_of_equal_logits_is_zero(dtype):
    logits, _ = two_logits(dtype=dtype)
    value, gradient = value_and_gradient(lambda each: token_kl(each, logits.detach().clone()), logits)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not value.any()
    assert not gradient.any()


@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_coarse_token_kl_equals_the_closed_form(top_k):
    logits, reference = two_logits()
    log_probs, tokens = top_log_probs(reference, top_k)
    value, gradient = value_and_gradient(lambda logits: coarse_token_kl(logits, log_probs, tokens), logits)
    expected, expected_gradient = value_and_gradient(
        lambda logits: coarse_formula(logits, reference.detach(), top_k), logits
    )
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def test_coarse_token_kl_rises_to_the_full_one():
    logits, reference = two_logits()
    full, full_gradient = value_and_gradient(lambda logits: token_kl(logits, reference), logits)
    last = torch.zeros(7, dtype=torch.float64)
    for top_k in range(1, VOCAB + 1):
        coarse, gradient = value_and_gradient(
            lambda logits, k=top_k: coarse_token_kl(logits, *top_log_probs(reference, k)), logits
        )
        assert (coarse >= last - 1e-12).all()
        assert (coarse <= full + 1e-12).all()
        last = coarse
    for top_k in (VOCAB - 1, VOCAB):  # the rest is one token, or none
        coarse, gradient = value_and_gradient(
            lambda logits, k=top_k: coarse_token_kl(logits, *top_log_probs(reference, k)), logits
        )
        torch.testing.assert_close(coarse, full, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, full_gradient, rtol=0, atol=1e-12)


def test_top_log_probs_sum_to_one():
    _, reference = two_logits()
    log_probs, tokens = top_log_probs(reference, 6)
    assert log_probs.shape == (7, 7)
    assert tokens.shape == (7, 6)
    torch.testing.assert_close(log_probs.logsumexp(-1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not log_probs.requires_grad


@pytest.mark.parametrize("is_reference_certain", [True, False])
def test_coarse_token_kl_of_certain_tokens_is_exact(is_reference_certain):
    """Nearly all mass on one token: 1 - its probability is 0 in fp32, the rest's log-probability is not."""
    certain, open_ = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)
    certain[0, 3] = 40.0
    logits, reference = (open_, certain) if is_reference_certain else (certain, open_)
    found = {}
    for dtype in (torch.float32, torch.float64):
        top = top_log_probs(reference.to(dtype), 2)
        found[dtype] = value_and_gradient(
            lambda each, t=top: coarse_token_kl(each, *t), logits.to(dtype).requires_grad_()
        )
    for one, other in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert found[torch.float32][0] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": -0.1}, r"strength=-0\.1 must be finite and not below 0"),
        ({"strength": math.inf}, "strength=inf must be finite"),
        ({"strength": "much"}, "strength='much' must be a number"),
        ({"strength": True}, "strength=True must be a number"),
        ({"reference": "base"}, "reference='base' must be 'online' or 'cached'"),
        ({"reference": "cached", "top_k": 0}, "top_k=0 must be a whole number above 0"),
        ({"reference": "cached", "top_k": 2.5}, r"top_k=2\.5 must be a whole number above 0"),
        ({"top_k": 64}, "top_k=64 belongs to reference='cached'"),
    ],
)
def test_kl_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KL(**arguments)


def test_kl_has_default_top_k():
    assert KL(reference="cached").top_k == 64
    assert KL().is_online
