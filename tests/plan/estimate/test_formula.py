"""The formula of a step's memory against the fake step."""

import pytest
import torch
from helpers.runs import MINIMAL, llama_args, make_config, write_config
from omegaconf import OmegaConf
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtune.models.llama2 import llama2, lora_llama2

from finch.cli.early_checks import read_job
from finch.config.schema import FullFinetuneKeys
from finch.config.validation import check
from finch.distributed.precision import precision_of
from finch.models.lora import train_adapters_only
from finch.plan.estimate.fake_step import estimate_step
from finch.plan.estimate.formula import Rows, memory_by_formula
from finch.training import chunked_loss
from finch.training.optimizer import optimizer_bytes

ROWS = Rows(seq=40, targets=23)
LAYERS = 4
KL = "finch.regularization.KL"


def config(**changes):
    return check(OmegaConf.create({**MINIMAL, "batch_size": 3, **changes}), FullFinetuneKeys)


def decoder():
    with torch.device("meta"):
        return llama2(**llama_args(num_layers=LAYERS))


def formula(model=None, ranks=1, **changes):
    return memory_by_formula(model or decoder(), config(**changes), ROWS, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (1, {"gradient_accumulation_steps": 2}),
        (1, {"enable_activation_checkpointing": True}),
        (2, {"dtype": "bf16_mixed"}),
        (1, {"kl_penalty": {"_component_": KL}}),
        (1, {"self_replay": {"share": 1.0, "max_new_tokens": 20}}),
    ],
    ids=str,
)
def test_peak_is_near_that_of_the_fake_step(ranks, changes, tmp_path):
    model = {"_component_": "torchtune.models.llama2.llama2", **llama_args(num_layers=LAYERS)}
    absent = tmp_path / "absent"
    written = make_config(absent, absent / "rows", tmp_path / "run", model=model, batch_size=3, **changes)
    recipe, cfg = read_job(write_config(tmp_path / "config", written), [], is_here=False)
    step = estimate_step(recipe, cfg, ranks=ranks, rows=ROWS)
    by_formula = memory_by_formula(decoder(), cfg, ROWS, ranks=ranks)
    assert by_formula["peak"] == pytest.approx(step.device_peak, rel=0.25)
    weights = step.between_steps["weights"] + step.between_steps.get("reference model", 0)
    assert by_formula["weights"] == pytest.approx(weights, rel=0.01)
    assert by_formula["optimizer states"] == pytest.approx(step.between_steps["optimizer states"], rel=0.01)


@pytest.mark.parametrize(
    ("component", "arguments", "dtype", "expected"),
    [
        ("torch.optim.AdamW", {}, "fp32", 8),
        ("torch.optim.AdamW", {"fused": True}, "bf16", 4),
        ("torch.optim.AdamW", {}, "bf16_stochastic", 8),
        ("torch.optim.SGD", {}, "fp32", 0),
        ("torch.optim.SGD", {"momentum": 0.9}, "fp32", 4),
        ("torchao.optim.AdamW8bit", {}, "bf16", 2 * (1 + 4 / 256)),
    ],
)
def test_optimizer_bytes_per_parameter(component, arguments, dtype, expected):
    cfg = config(optimizer={"_component_": component, "lr": 1e-5, **arguments})
    steps = []
    hook = register_optimizer_step_post_hook(
        lambda *_: steps.append(1)
    )  # of a profiler, which waits for the run's own steps
    assert optimizer_bytes(cfg, precision_of(dtype)) == expected
    hook.remove()
    assert not steps


def test_8bit_state_is_what_torchao_allocates():
    from torchao.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    state = AdamW8bit([parameter])._new_buffer(parameter, True)
    tensors = [getattr(state, name) for name in state.tensor_attrs if name != "qmap"]
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == parameter.numel() * (1 + 4 / 256)


def test_weights_gradients_and_states_follow_dtype_and_ranks():
    count = sum(parameter.numel() for parameter in decoder().parameters())
    plain = formula()
    assert (plain["weights"], plain["gradients"], plain["gathered layers"]) == (4 * count, 4 * count, 0)
    halves = formula(ranks=2)
    assert (halves["weights"], halves["gradients"], halves["optimizer states"]) == (2 * count, 2 * count, 4 * count)
    assert formula(ranks=2, dtype="bf16_mixed")["gathered layers"] == halves["gathered layers"] // 2 > 0
    assert formula(optimizer_in_bwd=True)["gradients"] < 4 * count
    assert formula(fsdp_cpu_offload=True)["peak"] < plain["peak"]


def test_lora_has_gradients_and_states_of_adapters_only():
    with torch.device("meta"):
        model = lora_llama2(["q_proj"], **llama_args(), lora_rank=2, lora_alpha=4)
    train_adapters_only(model, "torchtune.models.llama2.lora_llama2")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = formula(model)
    assert (parts["gradients"], parts["optimizer states"]) == (4 * trained, 8 * trained)
    assert parts["weights"] > 4 * trained
    assert formula(model, kl_penalty={"_component_": KL})["weights"] == parts["weights"]  # no second model
    full = formula(model.requires_grad_(True))  # here all matrices need their inputs
    assert parts["activations"] < full["activations"]


def test_kl_penalty_counts_a_second_model_unless_it_is_cached():
    plain, online = formula(ranks=2), formula(ranks=2, kl_penalty={"_component_": KL})
    cached = formula(ranks=2, kl_penalty={"_component_": KL, "reference": "cached"})
    assert (online["weights"], cached["weights"]) == (2 * plain["weights"], plain["weights"])
    assert online["logits and loss"] == cached["logits and loss"] == 2 * plain["logits and loss"]
    root = sum(p.numel() for name, p in decoder().named_parameters() if not name.startswith("layers."))
    assert online["gathered layers"] == plain["gathered layers"] + 4 * root


def test_checkpointing_and_chunks_save_activations_and_logits(monkeypatch):
    plain, recomputed = formula(), formula(enable_activation_checkpointing=True)
    hidden = 3 * 40 * 32 * 4
    assert plain["activations"] == LAYERS * recomputed["recomputed activations"] + 2 * hidden
    assert recomputed["activations"] == (LAYERS + 2) * hidden  # each layer's input
    loss = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", "num_output_chunks": 7}
    assert formula(loss=loss)["logits and loss"] == plain["logits and loss"]  # few enough to be kept
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", plain["logits and loss"] // 12)
    assert 4 * formula(loss=loss)["logits and loss"] == pytest.approx(plain["logits and loss"], rel=0.05)
    monkeypatch.undo()
    replay = {"share": 1.0, "max_new_tokens": 60}
    whole = formula(self_replay=replay)["logits and loss"]
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", whole // 50)
    assert formula(self_replay=replay)["logits and loss"] < whole / 4
