"""Validation, probes and the forgetting budget in the place of TorchTitan's validator."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils

from finch import files
from finch.errors import UserError
from finch.extras import require_extras
from finch.log import logger
from finch.titan.dataloader import RowsDataLoader, folder_of, to_sequence
from finch.titan.run_metrics import RunMetrics

BASELINES = "probes.json"
"""In the dump folder: the probes' values before the first step."""


class FinchValidator(Validator):
    """TorchTitan's validation loss, and finch's probes at the same steps; a budget for what one of them may lose.

    A probe's loss is the mean over all its target tokens in nats; a multiple-choice probe has an accuracy as well. Probes of kind ``self``
    need the model to generate, which TorchTitan's validator cannot: they are refused.

    Args:
        config: TorchTitan's settings, probes and budget.
        options: see ``torchtitan.components.validate.Validator``.

    Attributes:
        has_ended_run: whether the budget is exceeded and the run stops there.

    Raises:
        UserError: rows that cannot be used, or a budget that refers to nothing.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        dataloader: BaseDataLoader.Config = field(default_factory=lambda: RowsDataLoader.Config(infinite=False))
        """The rows of the validation loss; none where a RowsDataLoader names none."""

        probes: Annotated[dict[str, dict[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)
        """By name: the keys of a probe in finch's recipe, such as data_files, kind and rows."""

        forgetting_budget: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """``probe``, ``max_increase`` in nats a token, and ``action``: stop or note."""

    def __init__(self, config: Config, **options: Any) -> None:
        Validator.__init__(self, config, **options)
        rows = config.dataloader
        self._has_rows = not isinstance(rows, RowsDataLoader.Config) or bool(rows.source or rows.data_files)
        self._probes = _read_probes(config, folder_of(self.tokenizer), self.seq_len) if config.probes else {}
        self._budget = _read_budget(config)
        self._baselines: dict[str, Any] = {}
        self.has_ended_run = False

    def start(self, model_parts: list[nn.Module], step: int, folder: Path) -> None:
        """Measures the probes before the first step, or reads what an earlier start of the run has measured; a collective.

        Args:
            step: the last one of the run so far.
            folder: the run's.
        """
        file = folder / BASELINES
        digests = {name: probe.rows.digest for name, probe in self._probes.items()}
        if step > 0 and file.is_file():
            saved = json.loads(file.read_text())
            self._baselines = {
                name: saved[name] for name in digests if saved.get(name, {}).get("digest") == digests[name]
            }
        missing = [name for name in self._probes if name not in self._baselines]
        if not missing:
            return
        if step > 0:
            logger.warning(
                f"probes {', '.join(missing)} were not measured before the first step; changes count from step {step}"
            )
        metrics = self._evaluate(model_parts, step, missing)
        self._baselines |= {name: {"digest": digests[name], "metrics": metrics[name]} for name in missing}
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with files.atomic_file(file) as partial:
                files.write_text(partial, json.dumps(self._baselines) + "\n")

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Measures the validation loss and the probes; a collective."""
        if self._has_rows:
            Validator.validate(self, model_parts, step)
        if not self._probes:
            return
        metrics = self._evaluate(model_parts, step, list(self._probes))
        if self._budget is not None:
            change = metrics[self._budget.probe]["loss"] - self._baselines[self._budget.probe]["metrics"]["loss"]
            if not change <= self._budget.max_increase:  # a NaN is outside
                self.has_ended_run = self._budget.action == "stop"
                logger.warning(
                    f"forgetting_budget: {self._budget.key} {change:+.4f} at step {step} is outside {self._budget.max_increase:g}"
                    + ("; the run ends" if self.has_ended_run else "")
                )

    def _evaluate(self, model_parts: list[nn.Module], step: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
        from finch.probes.evaluation import probe_metrics

        begin = time.perf_counter()
        metrics = {
            name: probe_metrics(self._sample_losses(model_parts, self._probes[name]), self._probes[name].rows)
            for name in names
        }
        line: dict[str, float] = {}
        for name, values in metrics.items():
            line |= {f"probe/{name}/{key}": value for key, value in values.items()}
            before = self._baselines.get(name, {}).get("metrics")
            if before is not None:
                line |= {f"probe/{name}/{key}_change": value - before[key] for key, value in values.items()}
        run = self.metrics_processor.logger
        if isinstance(run, RunMetrics):
            run.add_event(step, {**line, "probe_seconds": round(time.perf_counter() - begin, 3)})
        logger.info(f"step {step}: " + "; ".join(f"{key} {value:.4f}" for key, value in line.items()))
        return metrics

    @torch.no_grad()
    def _sample_losses(self, model_parts: list[nn.Module], probe: Probe) -> torch.Tensor:
        """[samples] fp64 on the host: each sample's sum of losses over its targets in nats; the same on every rank; a collective."""
        for part in model_parts:
            part.eval()
        loss, sums_of = _sample_sums(self.loss_fn)
        device = torch.device(utils.device_type)
        sums = torch.zeros(len(probe.sequences), dtype=torch.float64, device=device)
        size, ranks = self.local_batch_size, self.dp_world_size
        for start in range(0, len(sums), size * ranks):
            indices = list(range(start, min(start + size * ranks, len(sums))))[self.dp_rank :: ranks]
            chosen = [probe.sequences[index] for index in indices] or [probe.sequences[0]]
            chosen += chosen[:1] * (size - len(chosen))  # of one shape; FSDP's forward is a collective
            inputs = {name: torch.stack([row[0][name] for row in chosen]).to(device) for name in chosen[0][0]}
            labels = torch.stack([row[1] for row in chosen]).to(device)
            tokens, targets, options = self.post_dataloading_process(inputs, labels, model_parts)
            with self.validation_context():
                loss(model_parts[0](tokens, **options), targets)
            sums[indices] = sums_of.pop()[: len(indices)]
        for part in model_parts:
            part.train()
        return dist_utils.dist_sum_tensor(sums, self.parallel_dims.get_optional_mesh("loss")).cpu()


@dataclass(frozen=True)
class Probe:
    """A probe's rows, and each of its samples as TorchTitan takes it."""

    rows: Any
    sequences: list[tuple[dict[str, torch.Tensor], torch.Tensor]]


class SampleSums(BaseLoss):
    """Not a loss to train with: collects each sample's sum of token losses, [batch] in nats."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self._sums: torch.Tensor | None = None

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses = compute_logprobs(pred, labels)
        assert isinstance(losses, torch.Tensor)
        sums = -losses.sum(1, dtype=torch.float64)
        self._sums = sums if self._sums is None else self._sums + sums
        return sums.sum().float(), {}

    def pop(self) -> torch.Tensor:
        """[batch] since the last call."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        return sums


def _sample_sums(loss: Any) -> tuple[BaseLoss, SampleSums]:
    """A loss that is called as a run's own, and what it collects."""
    if not isinstance(loss, ChunkedLossWrapper):
        sums = SampleSums(SampleSums.Config())
        return sums, sums
    chunked = ChunkedLossWrapper.Config(num_chunks=loss.num_chunks, loss_fn=SampleSums.Config()).build(
        compile_config=None
    )
    assert loss.lm_head is not None
    chunked.set_lm_head(loss.lm_head)
    return chunked, chunked.loss_fn


def _read_probes(config: FinchValidator.Config, folder: str, seq_len: int) -> dict[str, Probe]:
    require_extras("validator.probes", "torchtune")
    from finch.models import auto_tokenizer
    from finch.probes.rows import read_rows
    from finch.probes.settings import ProbeSettings

    tokenizer = auto_tokenizer(folder, max_seq_len=seq_len)
    probes = {}
    for name, block in config.probes.items():
        try:
            settings = ProbeSettings(**block)
        except TypeError as error:
            raise UserError(
                f"validator.probes.{name}: {error}; its keys are {', '.join(ProbeSettings.__annotations__)}"
            ) from error
        if settings.kind == "self":
            raise UserError(
                f"validator.probes.{name}.kind=self needs the model to generate, which TorchTitan's validator cannot; set another kind"
            )
        rows = read_rows(name, settings, tokenizer, seq_len)
        probes[name] = Probe(rows, [to_sequence(sample, seq_len, tokenizer.pad_id) for sample in rows.samples])
    return probes


def _read_budget(config: FinchValidator.Config) -> Any:
    block = config.forgetting_budget
    if not block:
        return None
    from finch.probes.settings import BudgetSettings

    wrong = set(block) - {"probe", "max_increase", "action"}
    if wrong or block.get("probe") not in config.probes or block.get("action", "note") not in ("stop", "note"):
        raise UserError(
            f"validator.forgetting_budget={block}: give probe, one of validator.probes; max_increase in nats; and action, stop or note"
        )
    try:
        max_increase = float(block["max_increase"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"validator.forgetting_budget={block}: max_increase must be a number of nats a token"
        ) from error
    return BudgetSettings(block["probe"], "loss", max_increase, block.get("action", "note"), "epochs")
