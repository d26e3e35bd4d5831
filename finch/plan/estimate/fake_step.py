"""One step of the recipe at the config's real shapes, on fake tensors and a fake process group.

Model, sharding, objective, optimizer and the step itself are the recipe's own. Fake tensors have a shape, a dtype and a size, but no
memory and no values: what would read a value is replaced here, and nothing else.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.data import _collate
from torchtune.modules import TransformerDecoder
from torchtune.modules.attention_utils import create_block_causal_mask

from finch.base.dtensor import to_local
from finch.base.errors import UserError
from finch.config.instantiate import component_of, locate
from finch.config.methods import LORA_RECIPE
from finch.data.loader import REFERENCES, Batch, collator
from finch.distributed import parallel
from finch.distributed.parallel import MeshSizes, Parallel
from finch.distributed.precision import Precision, precision_of
from finch.objectives import IGNORE_INDEX
from finch.optim.finch_lr import are_fused
from finch.optim.optimizer_variants import optimizers_in_backward
from finch.plan.estimate.formula import HOST_PARTS, OPTIMIZER, PENALTY, Rows, replayed_rows
from finch.plan.estimate.fused_norm import count_norms_as_one
from finch.plan.estimate.step_trace import RECOMPUTATION, UPDATE, Collective, StepTrace
from finch.training.kl_penalty import build_kl
from finch.training.loaded_model import LoadedModel
from finch.training.optimizer import build_optimizers, build_schedule, is_finch, make_update, optimizer_bytes
from finch.training.step import TrainStep
from finch.training.step_loss import StepLoss, StepMedian

_EIGHT_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
_CPU = torch.device("cpu")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_NATS = 1.0  # for what a run would read from its losses
_PRETRAINED = torch.linspace(0.1, 10, 8)  # losses of the pretrained model in nats
_MICRO_BATCHES = 2  # the first without gradients, the second with those of the first; all others are like the second


@dataclass(frozen=True)
class StepEstimate:
    """What one optimizer step takes on one rank.

    Attributes:
        parameters, trained: of the complete model.
        shards: ranks that share one copy of it.
        memory: bytes of each part at the peak.
        peak: their sum.
        peak_phase: when it is reached: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"update"``.
        between_steps: bytes of each part before a step.
        collectives: of the step.
        flops: operations of matrix products and attention by phase, see :class:`finch.plan.estimate.step_trace.StepTrace`.
        launches: operators that run something on the device, by phase; a fused optimizer, norm or attention counts as one.
        moved_bytes: that they read and write, by phase.
        tokens, targets: of the step on this rank, without padding.
        is_offloaded: whether weights, gradients and optimizer states are in host memory.
        notes: what was not run as the config says.
    """

    parameters: int
    trained: int
    shards: int
    memory: Mapping[str, int]
    peak: int
    peak_phase: str
    between_steps: Mapping[str, int]
    collectives: tuple[Collective, ...]
    flops: Mapping[str, int]
    launches: Mapping[str, int]
    tokens: int
    targets: int
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    is_offloaded: bool = False
    notes: tuple[str, ...] = ()

    @property
    def device_peak(self) -> int:
        """The peak without what is in host memory."""
        return self.peak - (sum(self.memory.get(part, 0) for part in HOST_PARTS) if self.is_offloaded else 0)

    @property
    def needed_flops(self) -> int:
        """Without recomputation."""
        return sum(flops for phase, flops in self.flops.items() if phase != RECOMPUTATION)

    @property
    def sent_bytes(self) -> int:
        """Of all collectives, by one rank."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def summed_collectives(self) -> list[tuple[str, int, int, int]]:
        """Kind, count, bytes of the complete tensors and bytes that a rank sends, largest first."""
        rows = []
        for kind in {collective.kind for collective in self.collectives}:
            calls = [collective for collective in self.collectives if collective.kind == kind]
            rows.append((kind, len(calls), sum(call.nbytes for call in calls), sum(call.sent_bytes for call in calls)))
        return sorted(rows, key=lambda row: -row[2])


def estimate_step(recipe: str, cfg: DictConfig, *, ranks: int, rows: Rows) -> StepEstimate:
    """Runs a step on fake tensors. Reads no file of the run; the process must be in no process group.

    Args:
        recipe: ``"finch_full_finetune"`` or ``"finch_lora_finetune"``.
        cfg: its config, checked.
        ranks: on all nodes.
        rows: of each micro-batch.

    Raises:
        UserError: the model cannot be built, the mesh does not fit the ranks, or a component of the user's own needs values.
    """
    cfg, notes = _runnable(cfg)
    precision = precision_of(cfg.dtype)
    number = cfg.gradient_accumulation_steps
    with fake_group(cfg, ranks, precision) as group, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step = FakeStep(cfg, group, precision, is_lora=recipe == LORA_RECIPE)
            trace = step.trace(rows, min(number, _MICRO_BATCHES))
        except _NEEDS_VALUES as error:
            raise UserError(
                f"the step calls {error.func}, which needs the values of tensors; `finch check` estimates the memory without running it"
            ) from error
        weights = list(step.decoder.parameters())
    repeats = number - trace.micro_batch
    repeated = trace.micro_batch if cfg.fsdp_reduce_every_micro_batch else 1  # not the only one that reduces

    def times(batch: int, phase: str) -> int:
        return 1 + repeats * (batch == repeated and phase != UPDATE)

    def of_step(counts: Counter[tuple[int, str]]) -> Counter[str]:
        """By phase, from counts by micro-batch and phase."""
        found: Counter[str] = Counter()
        for (batch, phase), count in counts.items():
            found[phase] += count * times(batch, phase)
        return found

    return StepEstimate(
        parameters=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        shards=1 if group.mesh is None else ranks // cfg.data_parallel_replicate_dim,
        memory=trace.memory.at_peak(),
        peak=trace.memory.peak,
        peak_phase=trace.memory.peak_phase,
        between_steps=step.between_steps,
        collectives=tuple(each for batch, phase, each in trace.collectives for _ in range(times(batch, phase))),
        flops=of_step(trace.flops),
        launches=of_step(trace.launches),
        tokens=step.tokens * number,
        targets=step.targets * number,
        moved_bytes=of_step(trace.moved_bytes),
        is_offloaded=cfg.fsdp_cpu_offload,
        notes=tuple(notes),
    )


def candidates(cfg: DictConfig) -> list[tuple[str, ...]]:
    """Overrides that each save memory on the same ranks, the cheapest first. All but 8-bit optimizer states keep the result."""
    found: list[tuple[str, ...]] = []
    if not cfg.enable_activation_checkpointing and cfg.ac_mode is None:
        found.append(("enable_activation_checkpointing=True",))
    if cfg.batch_size > 1 and not cfg.optimizer_in_bwd:  # which excludes accumulation
        found.append(
            ("batch_size=1", f"gradient_accumulation_steps={cfg.gradient_accumulation_steps * cfg.batch_size}")
        )
    component = component_of(cfg.optimizer) or ""
    if component in _EIGHT_BITS:
        removed = (f"~optimizer.{key}" for key in ("fused", "foreach") if key in cfg.optimizer)
        found.append((f"optimizer._component_={_EIGHT_BITS[component]}", *removed))
    if not cfg.fsdp_cpu_offload:
        found.append(("fsdp_cpu_offload=True",))
    return found


class FakeStep:
    """The recipes' step on fake tensors.

    Attributes:
        decoder: parallelized.
        between_steps: bytes of each part before the step.
        tokens, targets: of a micro-batch.
    """

    def __init__(self, cfg: DictConfig, group: Parallel, precision: Precision, *, is_lora: bool) -> None:
        self.cfg, self.parallel, self.precision = cfg, group, precision
        loaded = LoadedModel(cfg, precision, has_adapters=is_lora, has_files=False)
        self.decoder = loaded.decoder
        self.loss = StepLoss(cfg, self.decoder, group)
        objective = self.loss.objective
        # Of an objective that leaves out tokens by their loss: how many it leaves out is not known.
        objective.count = lambda batch: batch["targets"].numel()  # type: ignore[method-assign,assignment,return-value]
        if "pretrained_token_loss" in objective.needs:
            objective.prepare(_PRETRAINED, _PRETRAINED)
        self.loss.median = _FixedMedian(objective, group, cfg.gradient_accumulation_steps)
        _fill_rotary_tables(self.decoder)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        device = _CPU if cfg.device == "cpu" else torch.device("cuda")
        self.model = loaded.parallelize(group, device=device, **self.loss.model_options())
        if cfg.device != "cpu":
            count_norms_as_one(self.model)
        with self._mode:
            loaded.allocate()
            self._trace = StepTrace(self.model)
            with self._trace:
                self._step = self._build_step()
        self.between_steps = self._trace.memory.live()
        self.tokens = self.targets = 0

    def trace(self, rows: Rows, num_micro_batches: int) -> StepTrace:
        """One step of the recipe."""
        batches = [self._micro_batch(rows) for _ in range(num_micro_batches)]
        layout = batches[0].get("layout")
        self.tokens = batches[0]["tokens"].numel() if layout is None else layout.num_tokens
        self.targets = batches[0]["targets"].numel()
        self._trace.reset()
        with self._mode, self._trace:
            self._step(batches)
        return self._trace

    def _micro_batch(self, rows: Rows) -> Batch:
        """Rows as the recipe's collator makes them, of which no two share a prefix, and what objective and penalties need; real tensors."""
        cfg, vocab_size = self.cfg, self.decoder.tok_embeddings.weight.shape[0]
        source: Any = SimpleNamespace(packed=_is_packed(cfg), pad_id=0)  # in the place of samples and tokenizer
        if source.packed and cfg.tokenizer.get("max_seq_len") is None:
            raise UserError("tokenizer.max_seq_len=null gives dataset.packed=True no length of a pack: set it")
        row = functools.partial(_pack, total=cfg.tokenizer["max_seq_len"]) if source.packed else _row
        samples = [row(rows, first_token=number % vocab_size) for number in range(cfg.batch_size)]
        number, answer = replayed_rows(cfg, self.parallel.data_parallel_size)
        for _ in range(number):
            top_k = min(cfg.self_replay.top_k, vocab_size)
            references = torch.zeros(answer, top_k + 1), torch.zeros(answer, top_k, dtype=torch.int32)
            replayed = _row(Rows(2 * answer, answer), vocab_size - 1)
            samples.append({**replayed, **dict(zip(REFERENCES, references, strict=True))})
        # Where there is CUDA, packs get a mask of flex attention, which has no backward on the CPU's fake tensors.
        with mock.patch.object(_collate, "packed_block_causal_mask", create_block_causal_mask):
            batch = collator(source, source, locate(cfg.collate_fn, "collate_fn"))(samples)
        batch["num_replayed"] = torch.tensor(_NATS, dtype=torch.float64)
        if "pretrained_token_loss" in self.loss.objective.needs:
            batch["pretrained_token_loss"] = torch.ones(batch["labels"].shape)
        kl = build_kl(cfg)
        if kl is not None and not kl.is_online:
            number = len(batch["targets"])
            batch["reference_log_probs"] = torch.zeros(number, kl.top_k + 1)
            batch["reference_tokens"] = torch.zeros(number, kl.top_k, dtype=torch.int64)
        return batch

    def _build_step(self) -> TrainStep:
        """With optimizers with the states that they have after the first step, and the weights that a regularizer keeps."""
        weights = self.model.trained_parameters()
        if self.loss.regularizer is not None:
            with self._trace.allocating(PENALTY):
                self.loss.regularizer.start(weights.items())
        parameters = list(weights.values())
        cfg = self.cfg
        if _compiles_a_kernel(cfg, self.precision):
            make = functools.partial(_CountedStates, bytes_per_parameter=optimizer_bytes(cfg, self.precision))
            optimizers: Sequence[torch.optim.Optimizer]
            optimizers = optimizers_in_backward(parameters, make) if cfg.optimizer_in_bwd else [make(parameters)]
        else:
            optimizers = build_optimizers(cfg, parameters, self.precision, _CPU, tensor_lr=False)
        for weight in parameters:
            weight.grad = torch.zeros_like(weight)
        with self._trace.allocating(OPTIMIZER):
            for optimizer in optimizers:
                optimizer.step()
        self.model.zero_grad(set_to_none=True)
        update = make_update(cfg, self.model, optimizers, self._build_schedule(optimizers), self.parallel)
        update.clips_in_kernel = cfg.device != "cpu" and are_fused(optimizers)
        each = cfg.fsdp_reduce_every_micro_batch
        return TrainStep(self.model, self.loss, update, self.parallel, _CPU, reduces_each=each)

    def _build_schedule(self, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
        """FinchLR where it reads no loss on the host, as on CUDA with a fused optimizer; otherwise a stand-in, which allocates nothing."""
        cfg = self.cfg
        if not is_finch(cfg) or not are_fused(optimizers):
            return SimpleNamespace(step=lambda *_: True, metrics=dict)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]))
        return build_schedule(cfg, optimizers, init=_NATS, num_steps=1)


class _FixedMedian(StepMedian):
    """Reads no losses on the host."""

    def before_step(self, batches: Sequence[Batch], _: Any) -> None:
        self._value = _NATS if self.mode == "lagged" or (self.mode == "exact" and len(batches) > 1) else None

    def observe(self, _: Any, batch: Batch) -> None:
        if self.mode is not None:
            batch["statistic"] = torch.tensor(_NATS, dtype=torch.float64)

    def after_step(self) -> None:
        pass


class _CountedStates(torch.optim.Optimizer):
    """Stands for an optimizer that compiles its kernel: holds as many bytes of states, and no temporary tensor."""

    def __init__(self, parameters: Iterable[torch.Tensor], bytes_per_parameter: float) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._bytes_per_parameter = bytes_per_parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    size = int(to_local(parameter).numel() * self._bytes_per_parameter)
                    self.state[parameter]["states"] = torch.empty(size, dtype=torch.uint8)


def _compiles_a_kernel(cfg: DictConfig, precision: Precision) -> bool:
    return precision.stochastic or str(component_of(cfg.optimizer)).startswith(("torchao.", "bitsandbytes."))


def _fill_rotary_tables(decoder: TransformerDecoder) -> None:
    """Some tables read values, which fake tensors have not: they are computed here, and replaced by fake ones with the rest of the model."""
    for module in decoder.modules():
        if hasattr(module, "rope_init"):
            with _CPU:
                module.rope_init()
            module.rope_init = lambda: None


def _runnable(cfg: DictConfig) -> tuple[DictConfig, list[str]]:
    """The config with what fake tensors cannot do replaced, and a sentence about each replacement."""
    cfg, notes, precision = copy.deepcopy(cfg), [], precision_of(cfg.dtype)
    if cfg.compile:
        cfg.compile = False
        if cfg.device != "cpu" and precision.compute.itemsize > 2:  # as choose_way
            cfg.padding_free = False
        notes.append("compile=True: the step was counted without it; compiled kernels keep fewer activations")
    if cfg.enable_activation_offloading:
        cfg.enable_activation_offloading = False
        notes.append("enable_activation_offloading=True: activations are counted on the device")
    if _compiles_a_kernel(cfg, precision):
        notes.append("the optimizer's states are counted by a formula, and its temporary tensors are not")
    elif cfg.device != "cpu" and not cfg.optimizer.get("fused"):
        optimizer = locate(component_of(cfg.optimizer) or "", "optimizer")
        if "foreach" in inspect.signature(optimizer).parameters:
            cfg.optimizer.setdefault("foreach", True)  # torch's default on CUDA, with more temporary tensors
    return cfg, notes


@contextmanager
def fake_group(cfg: DictConfig, ranks: int, precision: Precision) -> Iterator[Parallel]:
    """Rank 0 of a process group whose collectives return at once."""
    sizes = MeshSizes(cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim)
    sizes = sizes.resolve(ranks)
    if ranks == 1 and not precision.is_mixed and not cfg.fsdp_cpu_offload:
        yield Parallel(_CPU)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield parallel.join(_CPU, sizes)
    finally:
        parallel.stop()


def _row(rows: Rows, first_token: int) -> dict[str, Any]:
    return {"tokens": [first_token] + [0] * (rows.seq - 1), "labels": _labels(rows)}


def _pack(rows: Rows, first_token: int, total: int) -> dict[str, Any]:
    """As many rows as fit into ``total`` tokens, and padding."""
    number = max(1, total // rows.seq)
    rest = max(0, total - number * rows.seq)
    seq_lens = [rows.seq] * number + [rest] * (rest > 0)
    return {
        "tokens": torch.full((sum(seq_lens),), first_token),
        "labels": torch.tensor(_labels(rows) * number + [IGNORE_INDEX] * rest),
        "input_pos": torch.cat([torch.arange(length) for length in seq_lens]),
        "seq_lens": torch.tensor(seq_lens),
    }


def _labels(rows: Rows) -> list[int]:
    return [IGNORE_INDEX] * (rows.seq - rows.targets) + [0] * rows.targets


def _is_packed(cfg: DictConfig) -> bool:
    node = cfg.dataset if isinstance(cfg.dataset, Mapping) else cfg.dataset[0]
    return bool(node.get("packed"))
