"""The recipe's probes, forgetting budget and self_replay around TorchTitan's steps. Their code is the recipe's: to it the trainer looks like one."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import AsyncMode
from torchtune.data import padded_collate_sft

from finch.base.dtensor import full_tensor
from finch.base.errors import UserError, WriteFailed
from finch.base.files import read_object, replace_text
from finch.base.log import logger
from finch.config.instantiate import build, first_line
from finch.config.schema import FullFinetuneKeys
from finch.config.validation import check
from finch.data.dataset import Samples
from finch.data.loader import REFERENCES, Batch, EvalSettings, collator, model_inputs, to_device
from finch.data.prompts import num_targets
from finch.distributed.parallel import Parallel
from finch.integrations.titan.checkpoints import way_to_resume
from finch.integrations.titan.recipe_config import RECIPE_KEYS, complete_folder, pretrained_folder, recipe_blocks
from finch.objectives.replay import rows_in_step, step_rows
from finch.probes.budget import ForgettingBudget
from finch.probes.probes import Probes, check_probes
from finch.training.checkpointer import TrainState
from finch.training.chunked_loss import cross_entropy, scatter
from finch.training.hooks import Hooks
from finch.training.readouts import Outputs, Readout, kl_from, read
from finch.training.run import Run
from finch.training.self_replay import SelfReplay
from finch.weights.huggingface import HuggingFaceFolder

STATE = "forgetting.json"
"""In the dump folder: the probes' values at step 0, and the budget's last one."""
_BLOCK = 128
"""Rows are padded to a multiple: compiled attention has few lengths to compile for."""
_REQUIRED = ("model", "tokenizer", "checkpointer", "dataset", "optimizer")


class TitanModel(nn.Module):
    """TorchTitan's model, called as a :class:`finch.training.chunked_loss.TokenLoss` is without a weighting. It keeps no keys and values: of an
    answer each token is a pass over all of them."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer, [self.model] = trainer, trainer.model_parts
        self.decoder = SimpleNamespace(layers=())  # none that takes a cache

    def forward(self, batch: Batch, readouts: Sequence[Readout] = ()) -> Outputs:
        trainer, tokens, labels, targets = self._trainer, batch["tokens"], batch["labels"], batch["targets"]
        number, length = tokens.shape
        places = targets
        if "mask" in batch:  # generation pads on the left, which a causal mask would see: each row begins at its text
            padding = length - 1 - batch["input_pos"][:, -1:]
            order = (torch.arange(length, device=tokens.device) + padding) % length
            tokens, places = tokens.gather(1, order), targets - padding.flatten()
        padded = min(-(-length // _BLOCK) * _BLOCK, trainer.config.training.seq_len)
        row, column = places // length, places % length
        inputs = {
            "input": F.pad(tokens, (0, padded - length)),
            "positions": torch.arange(padded, device=tokens.device).expand(number, padded).contiguous(),
        }
        seen = trainer.ntokens_seen
        inputs, _, options = trainer.post_dataloading_process(inputs, labels)
        trainer.ntokens_seen = seen  # these are not trained on
        skips = self.model._skip_lm_head
        self.model._skip_lm_head = True  # logits of the targets only, whatever the loss
        try:
            with trainer.train_context():
                hidden, index = self.model(inputs, **options).flatten(0, 1), row * padded + column
                if isinstance(hidden, DTensor):  # of tensor parallel, on which each rank has all
                    index = DTensor.from_local(index, hidden.device_mesh)
                logits = full_tensor(self.model.lm_head(hidden.index_select(0, index)))
        finally:
            self.model._skip_lm_head = skips
        at_targets = labels.flatten().index_select(0, targets)
        every = [Readout(lambda logits, labels: {"loss": cross_entropy(logits, labels)}), *readouts]
        found = read(every, logits, at_targets, *(rows for each in every for rows in each.rows))
        return {name: scatter(values, targets, labels) for name, values in found.items()}


class RecipeHooks:
    """What the hooks and self_replay see of a recipe, and when TorchTitan's trainer calls them.

    Built before weights are loaded. Raises UserError for settings that finch's recipe would refuse as well, and rows that cannot be used.
    """

    def __init__(self, trainer: Any) -> None:
        config = trainer.config
        self._trainer, self.cfg = trainer, _complete(recipe_blocks(trainer))
        self.tokenizer = build(self.cfg.tokenizer, "tokenizer")
        self.parallel, self.model = parallel_of(trainer), TitanModel(trainer)
        self.decoder = SimpleNamespace(max_seq_len=config.training.seq_len)
        self.state, self.run = TrainState(self.parallel, waits=True), _DumpFolder(config, self.parallel)
        self.base = HuggingFaceFolder(str(pretrained_folder(config)))
        self.metrics_log = trainer.run_metrics
        self.data: Any = self._rows_as_taken()
        self.replay: Any = SelfReplay(self.cfg, self.decoder, self.parallel)
        self.loss = SimpleNamespace(replay=self.replay)
        self._recipe = cast(Any, self)  # as far as they ask
        try:
            self.replay.read_prompts(self.tokenizer, self.data)
            self.hooks = Hooks({"probes": Probes(self._recipe), "budget": ForgettingBudget(self._recipe)})
        except UserError as error:
            raise UserError(str(error).replace("tokenizer.max_seq_len", "training.seq_len")) from error

    def _rows_as_taken(self) -> Any:
        """As far as hooks ask: every row has ``seq_len`` tokens."""
        cfg, config = self.cfg, self._trainer.config
        collate = functools.partial(collator, tokenizer=self.tokenizer, collate=padded_collate_sft)
        steps, rounds = config.training.steps, getattr(self._trainer.dataloader, "rounds_per_epoch", None)
        if rounds is not None:
            steps = max(1, min(steps, rounds // cfg.gradient_accumulation_steps))
        row = [0] * config.training.seq_len
        return SimpleNamespace(
            samples=Samples([{"tokens": row, "labels": row}], "dataloader", "TorchTitan's rows"),
            validations={},
            order=SimpleNamespace(seed=cfg.seed, global_batch=self.global_batch),
            steps_per_epoch=steps,
            eval_settings=EvalSettings(self.parallel, collate, cfg.batch_size),
        )

    @property
    def global_batch(self) -> int:
        return int(self.cfg.batch_size * self.cfg.gradient_accumulation_steps * self.parallel.data_parallel_size)

    def begin(self, step: int) -> None:
        """Before the first step of this start, after ``step`` others: answers are read or made, and what is measured of the pretrained model; a
        collective."""
        found = {} if step == 0 or not self.parallel.is_rank_zero else self._read(step)
        self.run.scalars = self.parallel.gather_all_ranks(found)[0]  # what one has read decides what all do
        self.hooks.each(lambda hook: hook.load_state_dict(self.run.scalars))
        self.replay.load_cache(self.base)
        needs = [self.replay.needs_pretrained, *self.hooks.each(lambda hook: hook.needs_pretrained(self._recipe))]
        if step > 0 and any(needs):
            raise UserError(
                f"{self.run.path} has no answers or values of the pretrained model for these probes or self_replay, and its weights are those of step {step}; "
                "resume with what the run began with, or start a new one"
            )
        self.replay.prepare(self.model)
        self.hooks.each(lambda hook: hook.prepare(self._recipe))
        if self.replay.rows is not None:
            samples = self.replay.rows.samples
            self._collate = self.data.eval_settings.loader("self_replay", samples).collate
            self._number = rows_in_step(self.replay.rows.share, self.global_batch)
        self.state.step = step
        self.hooks.each(lambda hook: hook.start(self._recipe))
        self._write()
        self.state.agree()
        if self.state.stop is not None:
            raise UserError(f"this run was stopped by {self.state.stop.reason}")

    def backward_replayed(self, step: int) -> None:
        """Adds the gradient of strength x the mean KL over the replayed tokens of ``step``, from 1, in passes of a micro-batch's size."""
        replay, settings, parallel = self.replay.rows, self.replay.settings, self.parallel
        if replay is None or settings is None:
            return
        rows = step_rows(replay.samples, step - 1, number=self._number, seed=replay.seed)
        ranks, size = parallel.data_parallel_size, self.cfg.batch_size
        mine, self._num_replayed = rows[parallel.data_parallel_rank :: ranks], sum(map(num_targets, rows))
        self._replay_kl = torch.zeros((), dtype=torch.float64, device=parallel.device)
        for start in range(0, -(-len(rows) // ranks), size):  # as many on every rank
            part = mine[start : start + size]
            batch = to_device(self._collate([dict(row) for row in part or rows[:1]]), parallel.device)
            with torch.set_grad_enabled(settings.strength > 0):
                kl = self.model(model_inputs(batch), [kl_from(*(batch[name] for name in REFERENCES))])["kl"].sum()
                kl = kl * bool(part)  # a rank without rows has run one of another's
            self._replay_kl += kl.detach() / self._num_replayed
            if settings.strength > 0:
                with self._trainer.train_context():
                    (kl * (settings.strength / self._num_replayed)).backward()

    def metrics(self) -> dict[str, Any]:
        """Of the step, as the recipe's; a collective."""
        if self.replay.rows is None:
            return {}
        return {"replay_kl": self.parallel.all_reduce_sum_(self._replay_kl), "num_replayed": self._num_replayed}

    def after_step(self, step: int, epoch: int, *, is_epoch_end: bool) -> None:
        """Measures what is due; a collective. Ends the run where the budget says so."""
        state, trainer, start = self.state, self._trainer, time.perf_counter()
        state.step, state.epoch, state.is_epoch_end, state.evaluated = step, epoch, is_epoch_end, {}
        self.hooks.after_step(state)
        if is_epoch_end:
            self.hooks.after_epoch(state)
            self.hooks.each(lambda hook: hook.after_export(state, None))
        if not state.evaluated:
            return
        trainer.metrics_processor.time_last_log += time.perf_counter() - start  # no time of training
        self._write()
        state.agree()
        if state.stop is not None:
            model_only = trainer.config.checkpoint.last_save_model_only
            way = f"; that step keeps only the model: {way_to_resume(trainer.config)}" if model_only else ""
            logger.info(f"stopped by {state.stop.reason} after step {step}{way}")
            trainer.config.training.steps = step  # so that TorchTitan saves this step as its last

    def end(self) -> None:
        """The closing lines; a collective."""
        self.hooks.each(lambda hook: hook.after_training(self.state))
        for lines in self.hooks.each(lambda hook: hook.summary(self.state)):
            for line in lines:
                logger.info(line)

    def export(self, name: str) -> bool:
        """Writes the model as it is now to the dump folder's ``name``, a Hugging Face folder; a collective."""
        trainer, folder = self._trainer, self.run.path / name
        checkpointer, dtype = trainer.checkpointer, trainer.checkpointer.export_dtype

        def write() -> None:
            weights = checkpointer.states["model"].state_dict()
            weights = {key: each.to(dtype) if each.is_floating_point() else each for key, each in weights.items()}
            try:
                checkpointer.dcp_save(weights, checkpoint_id=str(folder), async_mode=AsyncMode.DISABLED, to_hf=True)
            except (OSError, CheckpointException) as error:
                raise WriteFailed(first_line(error)) from error
            if self.parallel.is_rank_zero:
                tokenizer = getattr(trainer.dataloader, "chat_tokenizer", None)
                complete_folder(folder, Path(trainer.config.hf_assets_path), tokenizer)

        return self.run.export(write, name, self.parallel)

    def exported(self, name: str) -> str:
        return name

    def _read(self, step: int) -> dict[str, Any]:
        state = read_object(self.run.path / STATE) or {"step": step}
        budget = state.get("forgetting_budget")
        if budget is not None and budget["step"] > step:  # of an attempt that is taken back
            state["forgetting_budget"] = None
        return state

    def _write(self) -> None:
        if not self.parallel.is_rank_zero:
            return
        state = {key: value for hook in self.hooks.values() for key, value in hook.state_dict().items()}
        replace_text(self.run.path / STATE, json.dumps(state) + "\n")


class _DumpFolder(Run):
    """The dump folder as a run's, which TorchTitan has made."""

    def __init__(self, config: Any, parallel: Parallel) -> None:
        self.path, self.scalars, self.start_time = Path(config.dump_folder), {}, time.perf_counter()
        self.is_writer, self._cfg = parallel.is_rank_zero, OmegaConf.create({"save_best_only": False})


def check_keys(config: Any) -> None:
    """Raises UserError for values of the recipe's keys in a ``FinchTrainer.Config`` that are wrong, or that nothing can be measured by."""
    given = {key: value for key in RECIPE_KEYS if (value := getattr(config, key))}
    if pretrained_folder(config) is None:
        raise UserError(
            f"{', '.join(given)}: what the pretrained model answers is measured, so that a run starts from its folder: set checkpoint.enable, "
            "checkpoint.initial_load_in_hf and hf_assets_path"
        )
    if (degree := config.parallelism.context_parallel_degree) > 1:
        raise UserError(
            f"parallelism.context_parallel_degree={degree} is not supported with {', '.join(given)}, which run rows as a whole; set 1, or leave them out"
        )
    if config.parallelism.spmd_backend == "spmd_types" and config.parallelism.tensor_parallel_degree > 1:
        raise UserError(
            f"parallelism.spmd_backend=spmd_types with tensor parallel is not supported with {', '.join(given)}: a token's logits lie on several ranks; "
            "set partial_dtensor"
        )
    if config.self_replay and not config.training.disable_cuda_graphs:
        raise UserError(
            "training.disable_cuda_graphs=False is not supported with self_replay, whose passes are no part of a graph; set it to True"
        )
    _complete(given)


def _complete(blocks: dict[str, Any]) -> DictConfig:
    """A checked config of the recipe; what it must have, and no hook here reads, is filled in."""
    cfg = OmegaConf.create({**{key: {"_component_": "finch"} for key in _REQUIRED}, "output_dir": "", **blocks})
    check(cfg, FullFinetuneKeys, imports=False)
    check_probes(cfg)
    return cfg


def parallel_of(trainer: Any) -> Parallel:
    """This rank among TorchTitan's, whose tensor-parallel ranks are the innermost as well."""
    dims, world = trainer.parallel_dims, torch.distributed.get_world_size()
    mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    is_cpu = trainer.device.type == "cpu"
    return Parallel(
        trainer.device,
        torch.distributed.get_rank(),
        world,
        tensor_mesh=dims.get_mesh("tp") if dims.tp_enabled else None,
        data_group=None if mesh is None else mesh.get_group(),
        host_group=None if is_cpu or world == 1 else torch.distributed.new_group(backend="gloo"),
        data_parallel_size=1 if mesh is None else mesh.size(),
        data_parallel_rank=0 if mesh is None else mesh.get_local_rank(),
    )
