"""Phase 3: every objective and what a step may add to it, on the device in fp32 against the CPU in fp64; and a step that the host waits for nowhere."""

from __future__ import annotations

import copy
from typing import Any

import torch

from finch.config.methods import LORA, METHODS
from finch.gpu_check.models import Model, initial_weights, models, random_rows, step_config
from finch.gpu_check.report import Check
from finch.gpu_check.step import Step, worst_error

_STEPS, _ROWS = 2, 8
SGD = {  # an update in proportion to the gradient: Adam's first one is its sign, which rounding decides where it is small
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 0.25, "init": 6.0},
    "batch_size": _ROWS,
}
_LOSS_LIMIT, _GRADIENT_LIMIT = 1e-5, 1e-4
_CHANGE_LIMIT = 1e-3  # the weights' own rounding is in it
_PERPLEXITY = 1.6  # of the random model at a median token, over its vocabulary


def cases(vocab_size: int) -> dict[str, dict[str, Any]]:
    """What changes in the config, by the name of what is tested."""
    found: dict[str, dict[str, Any]] = {name: copy.deepcopy(METHODS[name].blocks) for name in ("sft", "flow", "dft", "talr", "stm", "eaft", "kl", "l2")}  # fmt: skip
    found["stm"]["loss"]["threshold"] = _PERPLEXITY * vocab_size
    found["lora"] = {}
    found["optimizer_in_bwd"] = {"optimizer_in_bwd": True, "clip_grad_norm": None}
    return {name: {**changes, **SGD} for name, changes in found.items()}


def run(check: Check) -> None:
    for model in list(models(check.device).values())[-1 if check.quick else 0 :]:
        for name, changes in cases(model.sizes["vocab_size"]).items():
            name, used = f"{model.name}: {name}", with_adapters(model) if name == "lora" else model
            if check.has_time(name):
                with check.case(name):
                    _compare(check, name, used, changes)
    _refuse_synchronisation(check, model)


def with_adapters(model: Model) -> Model:
    """The same model with LoRA layers."""
    module, _, builder = model.component.rpartition(".")
    return Model(model.name, f"{module}.lora_{builder}", {**model.sizes, **LORA, "lora_rank": 4, "lora_alpha": 8})


def _compare(check: Check, name: str, model: Model, changes: dict[str, Any]) -> None:
    weights = initial_weights(model)
    rows = random_rows(model.sizes["vocab_size"], _ROWS)
    losses, ends = [], []
    for device, dtype in (("cpu", "fp64"), (check.device, "fp32")):
        step = Step(step_config(check, model, **{**changes, "dtype": dtype, "device": device}), weights, torch.device(device))  # fmt: skip
        try:
            before = step.weights()
            step.prepare(rows)
            losses.append([step.take(rows)["loss"] for _ in range(_STEPS)])
            ends.append(step.gradients or {key: value - before[key] for key, value in step.weights().items()})
        finally:
            step.close()
    error = max(abs(seen - exact) / exact for exact, seen in zip(*losses, strict=True))
    check.at_most(f"{name}: losses of {_STEPS} steps", error, _LOSS_LIMIT)
    what, limit = ("gradients of the last", _GRADIENT_LIMIT) if step.gradients else ("change of the weights", _CHANGE_LIMIT)  # fmt: skip
    error, worst = worst_error(ends[1], ends[0])
    check.at_most(f"{name}: {what}", error, limit, note=f"worst of {worst}")


def _refuse_synchronisation(check: Check, model: Model) -> None:
    name = "a FINCH step in which the host reads nothing"
    if check.device == "cpu":
        check.not_run(name, "a CPU does not run ahead of the host")
        return
    with check.case(name):
        rows = random_rows(model.sizes["vocab_size"], _ROWS)
        step = Step(step_config(check, model, batch_size=_ROWS, dtype="bf16"), initial_weights(model), torch.device("cuda"))  # fmt: skip
        step.take(rows)
        batches = step.batches(rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.train_step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check.equal(name, "no synchronisation", "no synchronisation", note='torch.cuda.set_sync_debug_mode("error")')
