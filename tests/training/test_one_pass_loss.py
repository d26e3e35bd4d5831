"""One pass over chunks against logits recomputed in the backward, in float64; its products and its memory."""

from functools import partial

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.runs import llama_args, make_config, run_here
from omegaconf import OmegaConf
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.llama3_2 import llama3_2

from benchmarks.loss import OBJECTIVES, extra_memory
from finch.base import dtensor
from finch.distributed import fsdp
from finch.distributed.parallel import Parallel, start
from finch.objectives import DFT, EAFT, FLOW, STM, TALR, CrossEntropy
from finch.training import chunked_loss
from finch.training.chunked_loss import TokenLoss
from finch.training.kl_penalty import KLPenalty
from finch.training.one_pass_loss import Weighting, one_pass
from finch.training.self_replay import SelfReplay
from finch.training.step_loss import StepLoss, StepMedian

CPU = torch.device("cpu")


class Mean(DFT):
    """A weight that depends on all losses, of a user who knows nothing of chunks."""

    def weights(self, token_loss, batch):
        return token_loss / token_loss.mean()


VOCAB, TOKENS = 151_936, 16_384  # Qwen3's vocabulary
LORA = {"lora_attn_modules": ["q_proj"], "lora_rank": 4, "lora_alpha": 8}
CASES = {
    "sft": CrossEntropy(),
    "dft": DFT(),
    "eaft": EAFT(),
    "flow": FLOW(2.0),
    "stm": STM(8.0),
    "talr": TALR(2.0),
    "talr exact": TALR("exact"),
    "talr lagged": TALR("lagged"),
    "of a user": Mean(),
}
DECODERS = {
    "linear": llama2,
    "tied": partial(llama3_2, tie_word_embeddings=True),
    "frozen": partial(lora_llama2, **LORA),
    "adapter": partial(lora_llama2, **LORA, apply_lora_to_output=True),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 64 * 15)


@pytest.fixture
def passes(monkeypatch):
    """The weightings with which the one pass was taken."""
    taken = []

    def record(head, hidden, inputs, token_outputs, weighting, **options):
        taken.append(weighting)
        return one_pass(head, hidden, inputs, token_outputs, weighting, **options)

    monkeypatch.setattr(chunked_loss, "one_pass", record)
    return taken


def make_batch():
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 64, (5, 19)), torch.randint(0, 64, (5, 19))
    labels[0, :7], labels[2] = -100, -100
    pretrained = torch.rand(5, 19, dtype=torch.float64) * 4
    targets = (labels.flatten() != -100).nonzero().squeeze(1)
    return {"tokens": tokens, "labels": labels, "targets": targets, "pretrained_token_loss": pretrained}


def make_decoder(name, **changes):
    torch.manual_seed(0)
    decoder = DECODERS[name](**{**llama_args(), **changes}).double()
    if name in ("frozen", "adapter"):
        for weight_name, weight in decoder.named_parameters():
            weight.requires_grad_("lora" in weight_name)
            if "lora_b" in weight_name:
                torch.nn.init.normal_(weight)
    return decoder


def step_of(decoder, objective, kl=None):
    """Token losses, total and all gradients of a step of one micro-batch, its loss scaled as a step scales it."""
    kl = None if kl is None else {"_component_": "finch.regularization.KL", "strength": 0.3, **kl}
    parallel, batch = Parallel(CPU), make_batch()
    penalty = KLPenalty(OmegaConf.create({"kl_penalty": kl}), decoder, parallel)
    if kl is not None and not penalty.has_reference:
        batch["reference_log_probs"] = torch.full((len(batch["targets"]), 6), 1 / 6, dtype=torch.float64).log()
        batch["reference_tokens"] = torch.arange(5).expand(len(batch["targets"]), 5)
    torch.manual_seed(3)
    reference = llama2(**llama_args()).double().requires_grad_(False) if penalty.has_reference else None
    median = StepMedian(objective, parallel)
    median.last = 3.0
    median.before_step([batch], None)
    targets = torch.tensor(float(len(batch["targets"])), dtype=torch.float64)
    penalty.start_step(targets)
    decoder.zero_grad()
    model = TokenLoss(decoder, 4, reference)
    loss = object.__new__(StepLoss)  # without a config
    loss.objective, loss.median, loss.kl_penalty = objective, median, penalty
    loss.replay = SelfReplay(OmegaConf.create({"self_replay": None}), decoder, Parallel(CPU))
    losses, total = loss(model, batch, 1 / targets)
    (2 * total).backward()
    assert not losses.requires_grad
    gradients = {name: weight.grad.clone() for name, weight in decoder.named_parameters() if weight.requires_grad}
    return {"loss": losses, "total": total.detach(), **gradients, **penalty.metrics()}


@pytest.mark.parametrize(
    ("head", "objective", "kl"),
    [
        *(("tied", objective, None) for objective in CASES),
        *((head, "dft", None) for head in DECODERS if head != "tied"),
        *(
            ("linear", objective, kl)
            for objective in ("sft", "talr exact")
            for kl in ({}, {"reference": "cached", "top_k": 5}, {"strength": 0})
        ),
    ],
    ids=str,
)
def test_one_pass_equals_recomputed(head, objective, kl, monkeypatch, passes):
    """And kept logits."""
    decoder = make_decoder(head)
    found = step_of(decoder, CASES[objective], kl)
    assert [each.is_elementwise for each in passes] == [objective not in ("talr exact", "of a user")]
    for name, value in (("head_of", lambda *_: None), ("LOGITS_BYTES", 2**28)):
        with monkeypatch.context() as patch:
            patch.setattr(chunked_loss, name, value)
            expected = step_of(decoder, CASES[objective], kl)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-12, msg=key)
    assert len(passes) == 1
    assert sum(float(value.abs().sum()) for value in found.values()) > 1


def test_one_pass_in_bf16_is_that_of_fp32_rounded(passes):
    gradients, batch = [], make_batch()
    weighting = Weighting(lambda outputs: torch.ones_like(outputs["loss"]), True, torch.ones(()))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        decoder = llama2(**llama_args()).to(torch.bfloat16).to(dtype)
        TokenLoss(decoder, 8)(batch, weighting=weighting)["total"].backward()
        assert decoder.output.weight.grad.dtype == dtype
        gradients.append(decoder.output.weight.grad.float())
    assert len(passes) == 2
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()


@pytest.mark.parametrize(("is_elementwise", "products"), [(True, 3), (False, 4)])
def test_one_pass_takes_three_products_with_the_head(is_elementwise, products):
    batch, hidden = make_batch(), torch.randn(5, 19, 32, requires_grad=True)
    decoder = llama2(**llama_args())
    decoder.forward = lambda tokens: hidden
    weighting = Weighting(lambda outputs: torch.exp(-outputs["loss"]), is_elementwise, torch.ones(()))
    model = TokenLoss(decoder, 4)
    with FlopCounterMode(display=False) as flops:
        model(batch, weighting=weighting)["total"].backward()
    assert flops.get_total_flops() == products * 2 * len(batch["targets"]) * 32 * 64


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_memory_is_an_eighth_of_the_logits(name, monkeypatch):
    """Beyond parameters, gradients and hidden states, for Qwen3's vocabulary and 16,384 targets."""
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 2**28)
    assert 0 < extra_memory(name, VOCAB, TOKENS, 1024, torch.float32) <= 4 * VOCAB * TOKENS / 8


def gradient_of(name, group=None, policy=None):
    """The gradients of two micro-batches, by FSDP2 on this rank's half of the rows, or of all rows without a group; three layers in two groups."""
    decoder, batch = make_decoder(name, num_layers=3), make_batch()
    model, tokens, labels = TokenLoss(decoder, 3), batch["tokens"][:4], batch["labels"][:4]
    scale = 1 / (labels != -100).sum().double()
    if group is not None:
        if policy is not None:
            model.float()
        layers = fsdp.layer_groups(decoder.layers, nbytes=1, size=2)
        fsdp.shard_model(model, layers, group, mixed_precision=policy)
        fsdp.prefetch(layers)
        tokens, labels, scale = tokens.chunk(2)[group.rank], labels.chunk(2)[group.rank], 2 * scale
    inputs = {"tokens": tokens, "labels": labels, "targets": (labels.flatten() != -100).nonzero().squeeze(1)}
    weighting = Weighting(lambda outputs: torch.exp(-outputs["loss"] / 3), True, scale)
    for _ in range(2):  # accumulates
        model(inputs, weighting=weighting)["total"].backward()
    gradients = [weight.grad for weight in decoder.parameters() if weight.requires_grad]
    return torch.cat([dtensor.full_tensor(gradient).double().flatten() for gradient in gradients])


def on_two_ranks():
    """Called by each rank: relative differences from one process, and the number of passes."""
    group, passes = start(CPU, shard=True), []
    chunked_loss.LOGITS_BYTES = 4 * 64 * 5
    chunked_loss.one_pass = lambda *args, **options: passes.append(1) or one_pass(*args, **options)
    differences = []
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, policy in [*((name, None) for name in DECODERS), ("tied", bf16)]:
        expected = gradient_of(name)
        differences.append(float((gradient_of(name, group, policy) - expected).norm() / expected.norm()))
    return differences, len(passes)


def test_one_pass_on_two_ranks_is_that_of_one(tmp_path):
    """FSDP2 over two ranks: the gradients are the mean over ranks, tied head and adapters in the output layer included."""
    for (*differences, bf16), passes in on_ranks(
        2, "from training.test_one_pass_loss import on_two_ranks; tell(on_two_ranks())", tmp_path
    ):
        assert max(differences) < 1e-14
        assert bf16 < 0.05
        assert passes == 20


@pytest.mark.parametrize("optimizer_in_bwd", [False, True])
def test_one_pass_in_the_recipe(optimizer_in_bwd, base_folder, rows_file, tmp_path, monkeypatch, passes):
    """The same losses as with the logits kept."""
    losses = []
    changes = {"optimizer_in_bwd": optimizer_in_bwd, "clip_grad_norm": None, "dtype": "fp64", "max_steps_per_epoch": 4}
    changes |= {"epochs": 1, "loss": {"_component_": "finch.objectives.DFT"}}
    for number, size in enumerate((4 * 64 * 15, 2**28)):
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", size)
        run = run_here(tmp_path, make_config(base_folder, rows_file, tmp_path / str(number), **changes))
        assert run.returncode == 0, run.output[-2000:]
        losses.append(run.column("loss"))
    assert len(passes) == len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
