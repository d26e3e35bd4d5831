"""L2 and KL toward the pretrained model: against autograd of the plain formula, on one process and on many."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode

from finch.base import dtensor
from finch.distributed import fsdp, parallel
from finch.distributed.tensor_parallel import apply_plan
from finch.models.qwen3 import qwen3, qwen3_tp_plan
from finch.objectives.regularization import FORMS, KL, L2, coarse_token_kl, token_kl, top_log_probs

CPU = torch.device("cpu")
SIZE = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 30, "head_dim": 10, "max_seq_len": 16}
# Sizes that do not divide by the number of ranks: shards differ in size. Tensor parallelism needs even ones.
UNEVEN = {**SIZE, "vocab_size": 63, "intermediate_dim": 45}
UNEVEN_HALVES = {**SIZE, "vocab_size": 62, "intermediate_dim": 46}
STRENGTH = 0.37


def values(decoder, seed):
    """Complete tensors for every parameter, the same on any layout."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    return {name: torch.randn(parameter.shape, **options) for name, parameter in decoder.named_parameters()}


def fill(decoder, tensors):
    for name, parameter in decoder.named_parameters():
        dtensor.load_full_tensor(parameter, tensors[name])


def build(ranks, size):
    """A Qwen3 in float64, parallelized as in the recipe, and its two sets of weights."""
    decoder = qwen3(**size).double()
    pretrained = values(decoder, seed=1)
    steps = values(decoder, seed=2)
    tuned = {name: tensor + 0.1 * steps[name] for name, tensor in pretrained.items()}
    if ranks.tensor_mesh is not None:
        apply_plan(decoder, qwen3_tp_plan(), ranks.tensor_mesh)
    fsdp.shard_model(decoder, decoder.layers, ranks)
    return decoder, pretrained, tuned


def loss_of(decoder):
    tokens = torch.arange(24).reshape(2, 12) * 5 % 62
    logits = decoder(tokens)
    return (logits[0] if isinstance(logits, list) else logits).square().mean()


def formula(form, pairs, number):
    total = sum((theta - origin).square().sum() for theta, origin in pairs)
    return {"sum": STRENGTH * total, "half": STRENGTH * total / 2, "mean": STRENGTH * total / number}[form]


def reference(form, size=UNEVEN):
    """One process, without L2: autograd of the loss with the plain formula added."""
    decoder, pretrained, tuned = build(parallel.Parallel(CPU), size)
    fill(decoder, tuned)
    parameters = dict(decoder.named_parameters())
    pairs = [(parameter, pretrained[name]) for name, parameter in parameters.items()]
    penalty = formula(form, pairs, sum(parameter.numel() for parameter in parameters.values()))
    (loss_of(decoder) + penalty).backward()
    distance = torch.cat([(tuned[name] - pretrained[name]).flatten() for name in parameters]).norm()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"l2_penalty": penalty.item(), "distance": distance.item(), "gradients": gradients}


def one_step(ranks, form, size=UNEVEN, **options):
    """L2's penalty, distance and gradients on the ranks' shards."""
    decoder, pretrained, tuned = build(ranks, size)
    penalty = L2(STRENGTH, form, **options)
    fill(decoder, pretrained)
    penalty.start(decoder.named_parameters())
    fill(decoder, tuned)
    loss_of(decoder).backward()
    with CommDebugMode() as communication:
        metrics = penalty.add_gradients()
    return {
        **{name: metric.item() for name, metric in metrics.items()},
        "collectives": communication.get_total_counts(),
        "gradients": {name: dtensor.full_tensor(each.grad).tolist() for name, each in decoder.named_parameters()},
    }


def on_meshes():
    """Called by each of four ranks: every form on every mesh, theta0 on the device or offloaded."""
    hsdp = parallel.start(CPU, shard=False, sizes=parallel.MeshSizes(replicate=2, shard=2))
    fsdp = parallel.Parallel(CPU, mesh=hsdp.mesh["dp_shard"])  # two ranks, twice side by side
    with patch("torch.distributed.init_process_group"):  # ranks can meet once
        tensor = parallel.start(CPU, shard=False, sizes=parallel.MeshSizes(shard=2, tensor=2))
    results = {}
    for name, ranks in (("fsdp2", fsdp), ("hsdp", hsdp), ("shard x tensor", tensor)):
        size = UNEVEN if ranks.tensor_mesh is None else UNEVEN_HALVES
        results[name] = {form: one_step(ranks, form, size, offload=form == "half") for form in FORMS}
    parallel.stop()
    return results


def assert_equal(result, expected):
    for name in ("l2_penalty", "distance"):
        assert result[name] == pytest.approx(expected[name], rel=1e-12)
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = torch.as_tensor(result["gradients"][name], dtype=torch.float64) - gradient
        assert difference.norm() < 1e-12 * gradient.norm(), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offload", [False, True])
def test_l2_equals_autograd_of_the_formula(form, offload):
    assert_equal(one_step(parallel.Parallel(CPU), form, offload=offload), reference(form))


def test_l2_on_every_mesh_equals_one_process(tmp_path):
    every_rank = on_ranks(4, "from objectives.test_regularization import on_meshes; tell(on_meshes())", tmp_path)
    for mesh, form in itertools.product(("fsdp2", "hsdp", "shard x tensor"), FORMS):
        expected = reference(form, UNEVEN_HALVES if mesh == "shard x tensor" else UNEVEN)
        for results in every_rank:
            assert_equal(results[mesh][form], expected)
            # One for each mesh that parameters lie on; under tensor parallelism the norms' is another.
            assert results[mesh][form]["collectives"] == (2 if mesh == "shard x tensor" else 1)


def small(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype))
    origin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return model, origin


def move(model, by=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def test_l2_counts_frozen_parameters_in_the_mean_alone():
    """At every call; the first one finds no gradient and creates it."""
    model, origin = small()
    model[0].requires_grad_(False)
    penalty = L2(STRENGTH, "mean")
    penalty.start(model.named_parameters())
    number = sum(tensor.numel() for tensor in origin.values())
    expected = {name: torch.zeros_like(tensor) for name, tensor in origin.items() if name.startswith("1.")}
    for _ in range(2):
        move(model)  # frozen ones as well, which are not read
        metrics = penalty.add_gradients()
        moved = [(model.get_parameter(name), origin[name]) for name in expected]
        assert metrics["l2_penalty"].item() == pytest.approx(formula("mean", moved, number).item(), rel=1e-12)
        for name, gradient in expected.items():
            gradient += 2 * STRENGTH / number * (model.get_parameter(name).detach() - origin[name])
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in model[0].parameters())


@pytest.mark.parametrize("offload", [False, True])
def test_l2_computes_bf16_differences_and_norm_in_fp32(offload):
    """The sum with the gradient is rounded once, and many small squares are not lost in the norm."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(300, 300, dtype=torch.bfloat16))
    penalty = L2(STRENGTH, offload=offload)
    penalty.start([("weight", parameter)])
    origin = parameter.detach().double()
    with torch.no_grad():
        parameter.mul_(1.01)
    gradient = torch.randn_like(parameter)
    parameter.grad = gradient.clone()
    metrics = penalty.add_gradients()
    difference = parameter.detach().double() - origin
    assert torch.equal(parameter.grad, (gradient.float() + 2 * STRENGTH * difference.float()).bfloat16())
    assert metrics["distance"].item() == pytest.approx(difference.norm().item(), rel=1e-6)


def test_l2_of_strength_0_leaves_gradients_unchanged():
    model, origin = small()
    penalty = L2(0)
    penalty.start(model.named_parameters())
    move(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    metrics = penalty.add_gradients()
    assert (model[0].weight.grad == 1).all()
    assert model[1].weight.grad is None
    distance = torch.cat([(tensor - origin[name]).flatten() for name, tensor in model.named_parameters()]).norm()
    assert {name: each.item() for name, each in metrics.items()} == {
        "l2_penalty": 0,
        "distance": pytest.approx(distance.item(), rel=1e-12),
    }


def test_l2_does_not_read_the_device():
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode():
        model, _ = small(torch.bfloat16)
        penalty = L2()
        penalty.start(model.named_parameters())
        metrics = penalty.add_gradients()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            metrics["distance"].item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": -1.0}, r"strength=-1.0 must be finite and not below 0: give 1e-3"),
        ({"strength": float("inf")}, r"strength=inf must be finite"),
        ({"strength": "1e-3"}, r"strength='1e-3' must be a number"),
        ({"strength": True}, r"strength=True must be a number"),
        ({"form": "total"}, r"form='total' must be 'sum', 'half' or 'mean'"),
        ({"offload": "cpu"}, r"offload='cpu' must be True or False"),
    ],
)
def test_l2_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        L2(**arguments)


def test_l2_needs_start_with_something_trainable():
    penalty = L2()
    with pytest.raises(RuntimeError, match=r"L2\.start was not called"):
        penalty.add_gradients()
    with pytest.raises(ValueError, match="holds nothing trainable"):
        penalty.start([])


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


def assert_same(function, expected, logits):
    """In value and gradient."""
    for one, other in zip(value_and_gradient(function, logits), value_and_gradient(expected, logits), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def kl_formula(logits, reference):
    return F.kl_div(F.log_softmax(logits, -1), F.softmax(reference, -1), reduction="none").sum(-1)


def coarse_formula(logits, reference, top_k):
    """Probabilities, the rest as 1 - their sum."""
    top = reference.topk(top_k).indices
    q, q0 = (each.softmax(-1).gather(-1, top) for each in (logits, reference))
    rest, rest0 = 1 - q.sum(-1), 1 - q0.sum(-1)
    return (q0 * (q0 / q).log()).sum(-1) + rest0 * (rest0 / rest).log()


def test_token_kl_equals_torch_and_autograd():
    logits, reference = two_logits()
    assert_same(lambda each: token_kl(each, reference), lambda each: kl_formula(each, reference.detach()), logits)
    assert token_kl(logits, reference).min() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_kl_of_equal_logits_is_zero(dtype):
    logits, _ = two_logits(dtype=dtype)
    value, gradient = value_and_gradient(lambda each: token_kl(each, logits.detach().clone()), logits)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not value.any()
    assert not gradient.any()


@pytest.mark.parametrize("top_k", [1, 5, 40, VOCAB - 1, VOCAB])
def test_coarse_token_kl_equals_the_closed_form(top_k):
    """With a rest of one token or none it is the full one."""
    logits, reference = two_logits()
    log_probs, tokens = top_log_probs(reference, top_k)
    detached = reference.detach()
    expected = partial(kl_formula, reference=detached)
    if top_k < VOCAB - 1:
        expected = partial(coarse_formula, reference=detached, top_k=top_k)
    assert_same(lambda each: coarse_token_kl(each, log_probs, tokens), expected, logits)


@pytest.mark.parametrize("is_reference_certain", [True, False])
def test_coarse_token_kl_of_certain_tokens_is_exact(is_reference_certain):
    """Nearly all mass on one token: 1 - its probability is 0 in fp32, the rest's log-probability is not."""
    certain, open_ = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)
    certain[0, 3] = 40.0
    logits, reference = (open_, certain) if is_reference_certain else (certain, open_)
    found = []
    for dtype in (torch.float32, torch.float64):
        log_probs, tokens = top_log_probs(reference.to(dtype), 2)
        function = partial(coarse_token_kl, log_probs=log_probs, tokens=tokens)
        found.append(value_and_gradient(function, logits.to(dtype).requires_grad_()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert found[0][0] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": -0.1}, r"strength=-0\.1 must be finite and not below 0: give 0\.1"),
        ({"reference": "base"}, "reference='base' must be 'online' or 'cached'"),
        ({"reference": "cached", "top_k": 0}, "top_k=0 must be a whole number above 0"),
        ({"top_k": 64}, "top_k=64 belongs to reference='cached'"),
    ],
)
def test_kl_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KL(**arguments)
