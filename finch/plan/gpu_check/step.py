"""Phase 3: one training step of finch's recipe against a plain loop in float64, over dtype, checkpointing, compile and layout of the rows."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchtune.data import padded_collate_sft

from finch.base.dtensor import full_tensor, load_full_tensor
from finch.data.dataset import Samples
from finch.data.loader import Batch, collator, load_batches, model_inputs, to_device
from finch.distributed import parallel
from finch.distributed.precision import precision_of
from finch.plan.gpu_check.models import (
    BATCH,
    Model,
    Row,
    Weights,
    dataset_of,
    initial_weights,
    medium_models,
    random_rows,
    step_config,
)
from finch.plan.gpu_check.plain_model import plain_step, relative_error
from finch.plan.gpu_check.report import Check
from finch.training.loaded_model import LoadedModel
from finch.training.optimizer import build_update
from finch.training.step import TrainStep
from finch.training.step_loss import StepLoss

_CHECKPOINTING: dict[str, dict[str, Any]] = {
    "no checkpointing": {},
    "full checkpointing": {"enable_activation_checkpointing": True},
    "selective checkpointing": {"ac_mode": "selective", "ac_option": 2},
}
FACTORS: dict[str, Sequence[str]] = {
    "model": ("S", "Q"),
    "dtype": ("fp64", "fp32", "bf16", "bf16_mixed"),
    "checkpointing": tuple(_CHECKPOINTING),
    "compile": ("eager", "compile"),
    "layout": ("padded", "padding-free", "packed", "shared prefix"),
}
_FACTOR = 3.0  # times the error of the plain loop in the same dtype
_FLOOR = 1e-5  # also in fp64, in which the models compute norms and angles in fp32
_LOSS_FLOOR = 1e-3  # of 16 bits: the plain loop's error may be small by chance
_COMPILE_S = 30.0


class Step:
    """The recipes' step, with a model's initial weights, or those that ``draw`` returns, and rows that are given; ``cfg`` is checked. ``group``: to
    which this rank belongs; None: torchrun's, joined here.

    Attributes:
        step: the step itself.
        on_gradients: called when the gradients are complete; keeps them, for which the host waits.
        gradients: of the last step before they are clipped, complete, on the host; empty with ``optimizer_in_bwd``.
    """

    def __init__(
        self,
        cfg: Any,
        model: Model,
        draw: Callable[[torch.Size], torch.Tensor] | None = None,
        group: parallel.Parallel | None = None,
    ) -> None:
        self.cfg, self.device, precision = cfg, parallel.local_device(cfg.device), precision_of(cfg.dtype)
        shard = precision.is_mixed or cfg.fsdp_cpu_offload
        self.parallel = group or parallel.start_from(cfg, self.device, shard=shard)
        loaded = LoadedModel(cfg, precision, has_adapters="lora_rank" in cfg.model, has_files=False)
        self.loss = StepLoss(cfg, loaded.decoder, self.parallel)
        self.model = loaded.in_memory(self.parallel, **self.loss.model_options())
        for decoder in filter(None, (loaded.decoder, self.model.reference)):
            for name, parameter in decoder.state_dict(keep_vars=True).items():
                load_full_tensor(parameter, initial_weights(model)[name] if draw is None else draw(parameter.shape))
        if self.loss.regularizer is not None:
            self.loss.regularizer.start(self.model.trained_parameters().items())
        options: dict[str, Any] = {"num_steps": 10, "reference": None, "is_resumed": False}
        update = build_update(cfg, self.model, self.parallel, precision, **options)
        self.on_gradients, self.gradients = self._keep_gradients, Weights()
        self._pretrained: torch.Tensor | None = None
        parts, each = (self.model, self.loss, update, self.parallel, self.device), cfg.fsdp_reduce_every_micro_batch
        self.step = TrainStep(*parts, reduces_each=each, on_gradients=lambda: self.on_gradients())

    def _keep_gradients(self) -> None:
        trained = self.model.trained_parameters().items()
        self.gradients = _complete({name: weight.grad for name, weight in trained if weight.grad is not None})

    def prepare(self, rows: Sequence[Row]) -> None:
        """Gives an objective that needs them the losses before training, of ``rows`` in one micro-batch."""
        if "pretrained_token_loss" in self.loss.objective.needs:
            [batch] = self.batches(rows)
            with torch.no_grad():
                losses = self._pretrained = self.model(model_inputs(to_device(batch, self.device)))["loss"].cpu()
            means = self.loss.objective.sequence_losses(losses, batch)
            self.loss.objective.prepare(losses.flatten()[batch["targets"]], means)

    def batches(self, rows: Sequence[Row], layout: str = "padding-free") -> list[Batch]:
        """This rank's micro-batches, as the recipe's loader gives them."""
        pack = 2 * max(len(row["tokens"]) for row in rows) if layout == "packed" else 0
        samples = Samples(dataset_of(rows, pack), "dataset", "rows of seeds")
        collate = collator(samples, SimpleNamespace(pad_id=0), padded_collate_sft)
        parts = torch.arange(len(samples)).split(self.cfg.batch_size)
        mine = [part.tolist() for part in parts[self.parallel.data_parallel_rank :: self.parallel.data_parallel_size]]
        batches = list(load_batches(samples, mine, collate, pin_memory=self.device.type == "cuda"))
        if self._pretrained is not None:
            batches[0]["pretrained_token_loss"] = self._pretrained
        return batches

    def take(self, rows: Sequence[Row], layout: str = "padding-free") -> dict[str, float]:
        """A step on ``rows``, in micro-batches of the config's size; its metrics, on the host."""
        metrics = self.step(self.batches(rows, layout))
        return {
            name: float(full_tensor(torch.as_tensor(value))) for name, value in metrics.items() if value is not None
        }

    def weights(self) -> Weights:
        """The trained weights, complete, on the host."""
        return _complete(self.model.trained_parameters())


def _complete(tensors: Mapping[str, torch.Tensor]) -> Weights:
    return {
        name.replace(_CHECKPOINT_PREFIX, ""): full_tensor(tensor.detach()).to("cpu", copy=True)
        for name, tensor in tensors.items()
    }


def run(check: Check) -> None:
    if check.quick:
        os.environ.setdefault("TORCH_COMPILE_BACKEND", "aot_eager")  # inductor takes minutes
    for case in sorted(covering_array(FACTORS), key=_order):
        name = ", ".join(case.values())
        is_slow = case["compile"] == "compile" and not check.quick
        if check.device == "cuda" and (case["dtype"], case["layout"]) == ("fp64", "packed"):
            check.not_run(name, "flex attention, which packed rows need on a GPU, has no fp64")
        elif check.has_time(name, _COMPILE_S if is_slow else 0):
            with check.case(name):
                _compare(check, name, case)


def _order(case: Mapping[str, str]) -> tuple[Any, ...]:
    """Last what takes longest, on a GPU packed rows as well, which compile flex attention; else those of the same truth one after the other."""
    return case["compile"] == "compile", case["layout"] == "packed", case["model"], case["layout"] == "shared prefix"


def _rows(model: Model, has_prefix: bool) -> list[Row]:
    return random_rows(model.sizes["vocab_size"], BATCH, has_prefix=has_prefix)


@functools.lru_cache(maxsize=6)
def _truth(
    device: str, model: Model, has_prefix: bool, dtype: torch.dtype, stored: torch.dtype
) -> tuple[float, Weights]:
    """Loss and gradients of the plain loop that computes in ``dtype`` with weights that were rounded to ``stored``."""
    weights = {name: weight.to(device, stored) for name, weight in initial_weights(model).items()}
    return plain_step(model, weights, _rows(model, has_prefix), dtype)


def _compare(check: Check, name: str, case: Mapping[str, str]) -> None:
    precision, model = precision_of(case["dtype"]), medium_models(check.device)[case["model"]]
    has_prefix, device = case["layout"] == "shared prefix", check.device
    loss, exact = _truth(device, model, has_prefix, torch.float64, precision.weights)
    plain_loss, plain = _truth(device, model, has_prefix, precision.compute, precision.weights)
    changes = {"compile": case["compile"] == "compile", "padding_free": case["layout"] != "padded"}
    changes |= _CHECKPOINTING[case["checkpointing"]]
    torch._dynamo.reset()
    try:
        step = Step(step_config(check.folder, model, device=device, dtype=case["dtype"], **changes), model)
        seen = step.take(_rows(model, has_prefix), case["layout"])
    finally:
        parallel.stop()
    error, worst = worst_error(step.gradients, exact)
    limit = max(_FACTOR * worst_error(plain, exact)[0], _FLOOR)
    check.at_most(f"{name}: gradients", error, limit, note=f"worst of {worst}")
    limit = max(_FACTOR * abs(plain_loss - loss) / loss, _FLOOR if precision.compute.itemsize > 2 else _LOSS_FLOOR)
    check.at_most(f"{name}: loss", abs(seen["loss"] - loss) / loss, limit, expected=loss)
    norm = float(torch.stack([gradient.double().norm() for gradient in step.gradients.values()]).norm())
    check.at_most(f"{name}: gradient norm", abs(seen["grad_norm"] - norm) / norm, _FLOOR, expected=norm)


def worst_error(seen: Weights, exact: Weights) -> tuple[float, str]:
    """The largest relative error of a tensor, in the 2-norm, and its name; infinite if one is missing or not finite."""
    if seen.keys() != exact.keys():
        return float("inf"), ", ".join(sorted(seen.keys() ^ exact.keys()))
    return max((relative_error(seen[name], value), name) for name, value in exact.items())


def covering_array(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Cases in which any two values of different factors meet at least once: greedy, over all combinations."""
    cases = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]

    def pairs(case: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
        return set(map(frozenset, itertools.combinations(case.items(), 2)))

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen
