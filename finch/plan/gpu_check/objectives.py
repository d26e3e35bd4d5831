"""Phase 7: every objective and what a step may add to it, on the device in fp32 against the CPU in fp64; and a step in which the host waits for nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch

from finch.config.methods import LORA, METHODS
from finch.distributed import parallel
from finch.plan.gpu_check.models import TINY, Model, random_rows, step_config
from finch.plan.gpu_check.plain_model import worst_loss
from finch.plan.gpu_check.report import Check
from finch.plan.gpu_check.step import Step, worst_error

SGD = {  # an update in proportion to the gradient: Adam's first one is its sign, which rounding decides where it is small
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 0.25, "init": 6.0},
}
_STEPS, _ROWS = 2, 8
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
_CHANGE_LIMIT = 1e-3  # the weights' own rounding is in it
_PERPLEXITY = 1.6  # of the random model at a median token, over its vocabulary
_METHODS = ("sft", "flow", "dft", "talr", "stm", "eaft", "kl", "l2")


def run(check: Check) -> None:
    for model in [TINY["Q"]] if check.quick else TINY.values():
        cases: dict[str, dict[str, Any]] = {name: copy.deepcopy(METHODS[name].blocks) for name in _METHODS}
        cases["stm"]["loss"]["threshold"] = _PERPLEXITY * model.sizes["vocab_size"]
        cases |= {"lora": {}, "optimizer_in_bwd": {"optimizer_in_bwd": True, "clip_grad_norm": None}}
        for name, changes in cases.items():
            if check.has_time(name):
                with check.case(f"{model.name}, {name}"):
                    _compare(check, f"{model.name}, {name}", with_adapters(model) if name == "lora" else model, changes)
    _refuse_synchronisation(check)


def with_adapters(model: Model) -> Model:
    """The same model with LoRA layers."""
    module, _, builder = model.component.rpartition(".")
    return Model(model.name, f"{module}.lora_{builder}", {**model.sizes, **LORA, "lora_rank": 4, "lora_alpha": 8})


def _compare(check: Check, name: str, model: Model, changes: dict[str, Any]) -> None:
    rows = random_rows(model.sizes["vocab_size"], _ROWS)
    losses, ends = [], []
    for device, dtype in (("cpu", "fp64"), (check.device, "fp32")):
        step = Step(step_config(check.folder, model, **{**changes, **SGD, "dtype": dtype, "device": device}), model)
        before = step.weights()
        step.prepare(rows)
        losses.append([step.take(rows)["loss"] for _ in range(_STEPS)])
        changed = {key: value.double() - before[key] for key, value in step.weights().items()}
        ends.append(step.gradients or changed)
        parallel.stop()
    check.at_most(f"{name}: losses of {_STEPS} steps", worst_loss(losses[1], losses[0]), LOSS_LIMIT)
    what, limit = (
        ("gradients of the last", GRADIENT_LIMIT) if step.gradients else ("change of the weights", _CHANGE_LIMIT)
    )
    error, worst = worst_error(ends[1], ends[0])
    check.at_most(f"{name}: {what}", error, limit, note=f"worst of {worst}")


def _refuse_synchronisation(check: Check) -> None:
    name, model = "a FINCH step in which the host waits for nothing", TINY["Q"]
    if check.device == "cpu":
        check.not_run(name, "a CPU does not run ahead of the host")
        return
    with check.case(name):
        rows = random_rows(model.sizes["vocab_size"], _ROWS)
        step = Step(step_config(check.folder, model, device=check.device), model)
        step.take(rows)
        step.on_gradients = lambda: None
        batches = step.batches(rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check.equal(name, "no wait", "no wait", note='torch.cuda.set_sync_debug_mode("error")')
