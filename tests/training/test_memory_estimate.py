"""The memory estimate against what real tensors take."""

import pytest
import torch
from helpers.runs import MINIMAL, llama_args
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2, lora_llama2

from finch.config.schema import FullFinetuneKeys
from finch.config.validation import check
from finch.distributed.precision import precision_of
from finch.models.lora import train_adapters_only
from finch.training import chunked_loss
from finch.training.chunked_loss import TokenLoss
from finch.training.memory_estimate import MicroBatch, estimate_memory, optimizer_bytes

MICRO_BATCH = MicroBatch(batch=3, seq=40, targets=70)


def config(**changes):
    return check(OmegaConf.create({**MINIMAL, **changes}), FullFinetuneKeys)


def decoder(device="meta"):
    with torch.device(device):
        return llama2(**llama_args(num_layers=4))


def estimate(model=None, shards=1, is_sharded=False, micro_batch=MICRO_BATCH, **changes):
    return estimate_memory(model or decoder(), config(**changes), micro_batch, shards=shards, is_sharded=is_sharded)


def test_activations_are_what_autograd_saves():
    model = TokenLoss(decoder("cpu"))
    tokens = torch.zeros(3, 40, dtype=torch.long)
    labels = torch.where(torch.arange(120) < 70, 0, -100).view(3, 40)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            saved[storage.data_ptr()] = tensor  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, labels, (labels.flatten() == 0).nonzero().squeeze(1))
    del loss
    of_loss = 70 * model.decoder.output.weight.shape[0] * 4  # log-probabilities
    real = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - of_loss
    assert estimate().activations == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    ("component", "arguments", "dtype", "expected"),
    [
        ("torch.optim.AdamW", {}, "fp32", 8),
        ("torch.optim.AdamW", {"fused": True}, "bf16", 4),
        ("torch.optim.AdamW", {}, "bf16_mixed", 8),
        ("torch.optim.AdamW", {}, "bf16_stochastic", 8),
        ("torch.optim.SGD", {}, "fp32", 0),
        ("torch.optim.SGD", {"momentum": 0.9}, "fp32", 4),
        ("torchao.optim.AdamW8bit", {}, "bf16", 2 * (1 + 4 / 256)),
    ],
)
def test_optimizer_bytes_per_parameter(component, arguments, dtype, expected):
    cfg = config(optimizer={"_component_": component, "lr": 1e-5, **arguments})
    assert optimizer_bytes(cfg, precision_of(dtype)) == expected


def test_8bit_state_is_what_torchao_allocates():
    from torchao.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    state = AdamW8bit([parameter])._new_buffer(parameter, True)
    tensors = [getattr(state, name) for name in state.tensor_attrs if name != "qmap"]
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == parameter.numel() * (1 + 4 / 256)


def test_weights_gradients_and_states_follow_dtype_and_ranks():
    count = sum(parameter.numel() for parameter in decoder().parameters())
    plain = estimate()
    assert (plain.weights, plain.gradients, plain.optimizer, plain.gathered) == (4 * count, 4 * count, 8 * count, 0)
    halves = estimate(shards=2, is_sharded=True)
    assert (halves.weights, halves.gradients, halves.optimizer) == (2 * count, 2 * count, 4 * count)
    assert halves.gathered > 0
    assert estimate(dtype="bf16_mixed", is_sharded=True).gathered == halves.gathered // 2
    layer = max(p.numel() for p in decoder().layers[0].parameters())
    largest = max(layer, decoder().output.weight.numel())
    assert estimate(optimizer_in_bwd=True).gradients < 4 * count
    assert estimate(optimizer_in_bwd=True).gradients >= 4 * largest


def test_lora_has_gradients_and_states_of_adapters_alone():
    with torch.device("meta"):
        model = lora_llama2(["q_proj"], **llama_args(), lora_rank=2, lora_alpha=4)
    train_adapters_only(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = estimate(model)
    assert (parts.gradients, parts.optimizer) == (4 * trained, 8 * trained)
    assert parts.weights > 4 * trained


def test_kl_penalty_counts_a_second_model_except_with_lora():
    plain, shards = estimate(), {"shards": 2, "is_sharded": True}
    online = estimate(kl_penalty={"_component_": "finch.regularization.KL"})
    cached = estimate(kl_penalty={"_component_": "finch.regularization.KL", "reference": "cached"})
    assert (online.weights, cached.weights) == (2 * plain.weights, plain.weights)
    assert (online.gradients, online.optimizer) == (plain.gradients, plain.optimizer)
    assert online.logits == cached.logits == 2 * plain.logits
    sharded = estimate(kl_penalty={"_component_": "finch.regularization.KL"}, **shards)
    assert sharded.weights == plain.weights
    root = sum(p.numel() for name, p in decoder().named_parameters() if not name.startswith("layers."))
    assert sharded.gathered == estimate(**shards).gathered + 4 * root
    with torch.device("meta"):
        model = lora_llama2(["q_proj"], **llama_args(), lora_rank=2, lora_alpha=4)
    train_adapters_only(model)
    assert estimate(model, kl_penalty={"_component_": "finch.regularization.KL"}).weights == estimate(model).weights


def test_checkpointing_and_chunks_save_activations_and_logits(monkeypatch):
    plain = estimate()
    recomputed = estimate(enable_activation_checkpointing=True)
    layer = recomputed.recomputed
    assert plain.activations == 4 * layer + 2 * 3 * 40 * 32 * 4
    assert recomputed.activations == (4 + 2) * 3 * 40 * 32 * 4  # each layer's input
    half = estimate(enable_activation_checkpointing=True, ac_mode="selective", ac_option=2)
    assert recomputed.activations < half.activations < plain.activations
    assert estimate(micro_batch=MicroBatch(3, 40, 70, num_chunks=7)).logits == plain.logits  # few enough to be kept
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", plain.logits // 12)
    chunked = estimate(micro_batch=MicroBatch(3, 40, 70, num_chunks=7))
    assert 7 * chunked.logits == plain.logits


def test_peak_counts_gradients_beside_activations_only_when_accumulated():
    plain, accumulated = estimate(), estimate(gradient_accumulation_steps=2)
    step = plain.activations + plain.logits
    assert plain.peak == plain.weights + plain.optimizer + max(step, plain.gradients)
    assert accumulated.peak == plain.weights + plain.optimizer + plain.gradients + step
