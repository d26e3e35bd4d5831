"""Compiled layers without padding: a graph for training and one for evaluation, whatever the lengths, and the results of eager ones."""

import copy
import random
import shutil

import pytest
import torch
from helpers.models import FAMILIES
from torch._dynamo.utils import counters
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from finch.data.padding_free import remove_padding
from finch.training.chunked_loss import TokenLoss
from finch.training.model import compile_layers
from finch.training.padding_free_attention import accept_padding_free

LAYOUTS = 60


@pytest.mark.parametrize(("family", "checkpoints"), [("llama 3", True), ("qwen3 tied", False)])
def test_few_graphs_with_eager_results(family: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    eager = model_of(family, checkpoints)
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        accept_padding_free(model.decoder, "one call")
        model.way = "one call"
    compile_layers([compiled.decoder])
    draw = random.Random(0)
    for number in range(LAYOUTS):
        inputs = batch(draw)
        with (
            torch.set_grad_enabled(number % 5 > 0),
            torch._dynamo.config.patch(error_on_recompile=number > 1, verbose=False),
        ):
            assert_same_results(eager, compiled, inputs)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_has_eager_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_BACKEND", raising=False)
    eager = model_of("qwen3 tied", checkpoints=True)
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        accept_padding_free(model.decoder, "one call")
        model.way = "one call"
    compile_layers([compiled.decoder])
    draw = random.Random(1)
    for _ in range(4):
        assert_same_results(eager, compiled, batch(draw), relative=1e-6)


def model_of(family: str, checkpoints: bool) -> TokenLoss:
    torch.manual_seed(0)
    model = TokenLoss(FAMILIES[family].build(max_seq_len=200))
    if checkpoints:
        set_activation_checkpointing(model.decoder, auto_wrap_policy={TransformerSelfAttentionLayer})
    return model


def batch(draw: random.Random) -> dict:
    """1 to 16 rows of other lengths, with and without a prefix that all share."""
    rows, prefix = draw.choice([1, 2, 3, 16]), draw.choice([0, 9, 27])
    lengths = [prefix + draw.randint(3, 90) for _ in range(rows)]
    tokens = torch.randint(5, 90, (rows, max(lengths)))
    tokens[:, :prefix] = tokens[0, :prefix].clone()
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(lengths):
        labels[row, prefix : length - 1] = tokens[row, prefix + 1 : length]
    targets = (labels.flatten() != -100).nonzero().squeeze(1)
    return {"tokens": tokens, "labels": labels, "targets": targets, "layout": remove_padding(tokens, targets)}


def assert_same_results(eager: TokenLoss, compiled: TokenLoss, inputs: dict, relative: float = 0.0) -> None:
    found, expected = ([model(inputs)["loss"]] for model in (compiled, eager))
    if torch.is_grad_enabled():
        for model, results in ((compiled, found), (eager, expected)):
            results += torch.autograd.grad(results[0].square().sum(), list(model.parameters()))
    found, expected = (torch.cat([each.detach().flatten() for each in results]) for results in (found, expected))
    assert (found - expected).norm() <= relative * expected.norm()
