"""Phase 2: one training step of finch's recipe against a plain loop in float64, over dtype, checkpointing, compile and layout of the rows."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from finch_full_finetune import FinchFullFinetune
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchtune.data import padded_collate_sft
from torchtune.datasets import PackedDataset

from finch.data.dataset import Samples
from finch.data.loader import Batch, collator, model_inputs, to_device
from finch.distributed.parallel import start_from
from finch.distributed.parallel import stop as stop_group
from finch.distributed.precision import precision_of
from finch.dtensor import full_tensor, load_full_tensor
from finch.gpu_check.models import BATCH, PREFIX, Row, Weights, initial_weights, models, random_rows, step_config, with_labels
from finch.gpu_check.plain_model import plain_step
from finch.gpu_check.report import Check
from finch.models.lora import train_adapters_only
from finch.training.model import allocate, decoder_on_meta, parallelize
from finch.training.optimizer import build_update
from finch.training.step_loss import StepLoss

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "no checkpointing": {},
    "full checkpointing": {"enable_activation_checkpointing": True},
    "selective checkpointing": {"ac_mode": "selective", "ac_option": 2},
}
LAYOUTS = ("padded", "padding-free", "packed", "shared prefix")
FACTORS: dict[str, Sequence[str]] = {
    "model": ("S", "Q"),
    "dtype": ("fp64", "fp32", "bf16", "bf16_mixed"),
    "checkpointing": tuple(CHECKPOINTING),
    "compile": ("eager", "compile"),
    "layout": LAYOUTS,
}
_FACTOR = 3.0  # times the error of the plain loop in the same dtype
_FLOORS = {"fp64": 2e-6}  # the models compute norms and angles in fp32 in every dtype
_FLOOR = 1e-5
_BF16_NORM = 2.0**-8  # a norm that is returned in bf16


class Step(FinchFullFinetune):
    """The recipe as far as its step needs it, on values and rows that are given.

    Args:
        cfg: of a recipe, checked.
        weights: by the names of the decoder's state dict, complete; on every rank the same.

    Attributes:
        gradients: of the last step before they are clipped, complete, in fp64.
    """

    def __init__(self, cfg: Any, weights: Weights, device: torch.device) -> None:
        # Not the recipe's own: it needs a folder with a model, and one for the run.
        self.cfg, self.device, self.precision = cfg, device, precision_of(cfg.dtype)
        self.parallel = start_from(cfg, device, shard=self.precision.is_mixed or cfg.fsdp_cpu_offload)
        self.decoder, plan, component = decoder_on_meta(cfg, self.precision)
        if "lora_rank" in cfg.model:
            train_adapters_only(self.decoder, component)
        self.loss = StepLoss(cfg, self.decoder, self.parallel)
        self.model = parallelize(self.decoder, cfg, self.parallel, self.precision, plan=plan, **self.loss.model_options())  # fmt: skip
        allocate(self.model, cfg, self.parallel, self.precision)
        for decoder in (self.decoder, self.model.reference):
            for name, parameter in ({} if decoder is None else decoder.state_dict(keep_vars=True)).items():
                load_full_tensor(parameter, weights[name])
        if self.loss.regularizer is not None:
            self.loss.regularizer.start(self.model.trained_parameters().items())
        self.update = build_update(cfg, self.model, self.parallel, self.precision, num_steps=10, initial_loss=None, is_resumed=False)  # fmt: skip
        self.state: Any = SimpleNamespace(step=0, epoch=0)
        self.gradients: Weights = {}
        self._pretrained: list[torch.Tensor] = []
        clip = self.update.clip

        def keep_gradients() -> Any:
            self.gradients = {
                name.replace(_CHECKPOINT_PREFIX, ""): full_tensor(weight.grad).double().clone()
                for name, weight in self.model.trained_parameters().items()
                if weight.grad is not None
            }
            return clip()

        self.update.clip = keep_gradients  # type: ignore[method-assign]

    def prepare(self, rows: Sequence[Row]) -> None:
        """Gives an objective that needs them the losses on ``rows`` before training."""
        if "pretrained_token_loss" not in self.loss.objective.needs:
            return
        for batch in self.batches(rows):
            with torch.no_grad():
                losses = self.model(**model_inputs(to_device(batch, self.device)))
            self._pretrained.append(losses.cpu())
        [losses], [batch] = self._pretrained, self.batches(rows)
        at_targets = losses.flatten()[batch["targets"]]
        self.loss.objective.prepare(at_targets, self.loss.objective.sequence_losses(losses, batch))

    def batches(self, rows: Sequence[Row], layout: str = "padding-free") -> list[Batch]:
        """This rank's micro-batches, as the recipe's loader gives them."""
        batches = micro_batches(rows, layout, self.cfg.batch_size)
        for batch, losses in zip(batches, self._pretrained, strict=False):
            batch["pretrained_token_loss"] = losses
        if self.device.type == "cuda":
            batches = [{name: value.pin_memory() if hasattr(value, "pin_memory") else value for name, value in batch.items()} for batch in batches]  # fmt: skip
        return batches[self.parallel.data_parallel_rank :: self.parallel.data_parallel_size]

    def take(self, rows: Sequence[Row], layout: str = "padding-free") -> dict[str, float]:
        """A step on ``rows``, in micro-batches of the config's size; its metrics, on the host."""
        self.state.step += 1
        metrics = self.train_step(self.batches(rows, layout))
        return {name: float(full_tensor(value) if isinstance(value, torch.Tensor) else value) for name, value in metrics.items() if value is not None}  # fmt: skip

    def weights(self) -> Weights:
        """The trained weights, complete, in fp64."""
        trained = self.model.trained_parameters().items()
        return {
            name.replace(_CHECKPOINT_PREFIX, ""): full_tensor(weight.detach()).double().cpu().clone()
            for name, weight in trained
        }

    def close(self) -> None:
        stop_group()


def micro_batches(rows: Sequence[Row], layout: str, size: int) -> list[Batch]:
    """The rows as finch's collator puts them into batches, on the host."""
    data: Any = with_labels(rows)
    if layout == "packed":
        longest = max(len(row["tokens"]) for row in rows)
        data = PackedDataset(data, max_seq_len=2 * longest)
        size = -(-len(data) * size // len(rows))
    samples = Samples(data, "dataset", "rows of seeds")
    collate = collator(samples, SimpleNamespace(pad_id=0), padded_collate_sft)
    return [collate([samples[index] for index in part.tolist()]) for part in torch.arange(len(samples)).split(size)]


def run(check: Check) -> None:
    if check.quick:
        os.environ.setdefault("TORCH_COMPILE_BACKEND", "aot_eager")  # inductor takes minutes
    truths = functools.cache(functools.partial(_truth, check.device))
    for case in covering_array(FACTORS):
        name = ", ".join(case.values())
        if check.has_time(name):
            with check.case(name):
                _compare(check, name, case, truths)


def _truth(device: str, model: str, has_prefix: bool, dtype: torch.dtype, weights_dtype: torch.dtype) -> tuple[list[Row], Weights, float, Weights]:  # fmt: skip
    """Rows and weights, and the loss and gradients of the plain loop that computes in ``dtype``."""
    size, place = models(device)[model], torch.device(device)
    rows = random_rows(size.sizes["vocab_size"], BATCH, prefix=PREFIX if has_prefix else 0)
    weights = {name: weight.to(place) for name, weight in initial_weights(size, weights_dtype).items()}
    return rows, weights, *plain_step(size, weights, rows, dtype)


def _compare(check: Check, name: str, case: Mapping[str, str], truths: Any) -> None:
    model, dtype, precision = models(check.device)[case["model"]], case["dtype"], precision_of(case["dtype"])
    arguments = (case["model"], case["layout"] == "shared prefix")
    rows, weights, loss, exact = truths(*arguments, torch.float64, precision.weights)
    _, _, plain_loss, plain = truths(*arguments, precision.compute, precision.weights)
    limit = max(_FACTOR * worst_error(plain, exact)[0], _FLOORS.get(dtype, _FLOOR))
    changes = {"dtype": dtype, "compile": case["compile"] == "compile", "padding_free": case["layout"] != "padded"}
    cfg = step_config(check, model, **changes, **CHECKPOINTING[case["checkpointing"]])
    torch._dynamo.reset()
    step = Step(cfg, weights, torch.device(check.device))
    try:
        seen = step.take(rows, case["layout"])
        gradients = step.gradients
    finally:
        step.close()
    error, worst = worst_error(gradients, exact)
    check.at_most(f"{name}: gradients", error, limit, note=f"worst of {worst}")
    limit = max(_FACTOR * abs(plain_loss - loss) / loss, _FLOORS.get(dtype, _FLOOR))
    check.at_most(f"{name}: loss", abs(seen["loss"] - loss) / loss, limit, expected=loss)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    limit = _BF16_NORM if precision.weights == torch.bfloat16 else _FLOORS.get(dtype, _FLOOR)
    check.at_most(f"{name}: gradient norm", abs(seen["grad_norm"] - norm) / norm, limit, expected=norm)


def worst_error(seen: Weights, exact: Weights) -> tuple[float, str]:
    """The largest relative error of a tensor, in the 2-norm, and its name; infinite if one is missing."""
    if seen.keys() != exact.keys():
        return float("inf"), ", ".join(sorted(seen.keys() ^ exact.keys()))
    errors = {name: float((seen[name].to(value.device) - value).norm() / value.norm()) for name, value in exact.items()}
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return errors[worst], worst


def covering_array(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Cases in which any two values of different factors meet at least once: greedy, over all combinations."""
    cases = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    pairs = {frozenset(pair) for case in cases for pair in itertools.combinations(case.items(), 2)}
    chosen = []
    while pairs:
        best = max(cases, key=lambda case: sum(frozenset(pair) in pairs for pair in itertools.combinations(case.items(), 2)))  # fmt: skip
        chosen.append(best)
        pairs -= {frozenset(pair) for pair in itertools.combinations(best.items(), 2)}
    return chosen
