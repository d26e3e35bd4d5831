"""FINCH and self-replay for transformers' Trainer and TRL's SFTTrainer: callbacks, no subclass and no patch."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.base.log import logger
from finch.data.skills import skill_rows
from finch.integrations.objective_loss import LossReader, ObjectiveLoss, shift, uniform_loss
from finch.integrations.self_replay import (
    Answer,
    answer_kl,
    answer_tokens,
    digest_of,
    evaluating,
    has_module,
    is_replaying,
    measured_answers,
    own_answers,
    read_answers,
    replay_kl_sum,
    save_answers,
)
from finch.integrations.step_loss import MeanLoss, check_settings, has_ranks
from finch.objectives.divergence import describe, divergence
from finch.objectives.replay import around_content, end_turn, rows_in_step, step_rows
from finch.optim.finch_lr import ETA_MAX, FinchLR

require_extras("finch.integrations.transformers", "hf")

from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from transformers.trainer_utils import has_length

ANSWERS_FILE = "self_replay.safetensors"
"""The pretrained model's own answers, in the Trainer's output_dir."""
MEASURED_FILE = "forgetting.safetensors"
"""Those that ForgettingCallback measures."""

_LABELS = "finch_labels"
_OTHER_HEAD = re.compile("For(Masked.*|.*(Classification|Answering|Choice|Prediction|Pre[Tt]raining))$")
_NUM_MEASURED = 96  # eight of each skill
_TOLERANCE = 1e-2  # relative, of the Trainer's loss against the mean over target tokens: 4.57 rounds what it logs
_replay_hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
_hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


class FinchCallback(TrainerCallback, ExportableState):
    """Sets the learning rate of each optimizer step from that step's loss, on the Trainer's own optimizer.

        args = TrainingArguments(..., learning_rate=2e-5, lr_scheduler_type="constant")
        Trainer(model, args, ..., callbacks=[FinchCallback(eta_max=5e-5)])

    - **Loss.** A forward hook on the model sums the cross-entropies of the target tokens over the micro-batches, only in training;
      ``on_pre_optimizer_step`` adds up the ranks and sets the learning rate. With label smoothing, or with an objective, FINCH still
      sees the unweighted cross-entropy. The model then does not get the labels: they reach the hook in the batch, under a separate key
      that the data loader's collator adds and a hook removes.
    - **Skipped updates.** A step without target tokens, or with a non-finite loss under ``on_nonfinite="skip"``, drops its gradients.
    - **Logs.** ``learning_rate`` is the one that the step was taken with, in every logger. ``ema_loss`` is in ``log_history`` and in
      what callbacks after this one see. The first step is always logged, to compare the Trainer's loss with FINCH's.
    - **Checkpoints.** The state is in each one's trainer_state.json; one without it is not resumed from.
    - **Ranks.** One process, DDP and FSDP2. DataParallel and DeepSpeed are refused.

    Args:
        eta_max: see :class:`finch.FinchLR`.
        init: where the moving average starts, in nats: ``"dataset"``, the model's mean loss over the training rows, by one pass before the
            first step, as in the paper; ``"first_batch"``; or a number.
        eta_base: learning rate at a loss of 1 nat; None takes the first param group's, ``TrainingArguments.learning_rate``, also where a
            resumed run has changed that.
        warmup_steps: 0 takes those of TrainingArguments, ``warmup_steps`` or ``warmup_ratio``.
        ema, eps, decay, on_nonfinite, max_nonfinite: see :class:`finch.FinchLR`.
        compute_loss_func: the :class:`ObjectiveLoss` that the Trainer was given, if any.
        check_loss: end the run after the first step if the Trainer's loss is not the mean over target tokens, since FINCH follows
            that mean. False for a loss that differs on purpose.

    Attributes:
        schedule: the :class:`finch.FinchLR`, from the start of training on.

    Raises:
        ValueError: an argument is out of range.
        UserError: from the Trainer's constructor or ``train``: another schedule, FINCH twice, DataParallel, DeepSpeed, an optimizer that
            steps in the backward, a model that is no causal LM, a checkpoint without FINCH's state, labels that do not reach the model,
            an optimizer that was replaced, another loss.
        FloatingPointError: during training, see :class:`finch.FinchLR`.
    """

    schedule: FinchLR

    def __init__(
        self,
        *,
        eta_max: float | str = ETA_MAX,
        init: float | str = "dataset",
        eta_base: float | None = None,
        ema: float = 0.9,
        eps: float = 1e-8,
        warmup_steps: int = 0,
        decay: float = 0.0,
        on_nonfinite: str = "raise",
        max_nonfinite: int = 10,
        compute_loss_func: ObjectiveLoss | None = None,
        check_loss: bool = True,
    ) -> None:
        self._init = init
        self._options: dict[str, Any] = {"eta_max": eta_max, "eta_base": eta_base, "ema": ema, "eps": eps}
        self._options |= {"warmup_steps": warmup_steps, "decay": decay}
        self._options |= {"on_nonfinite": on_nonfinite, "max_nonfinite": max_nonfinite}
        check_settings(init="first_batch" if init == "dataset" else init, **self._options)
        self._objective_loss = compute_loss_func
        self._checks_loss = check_loss and compute_loss_func is None

    def state(self) -> dict[str, Any]:
        """What the Trainer keeps in its checkpoints, and may make the callback from again."""
        schedule = getattr(self, "schedule", None)  # there from the start of training on
        arguments = {**self._options, "init": self._init, "check_loss": self._checks_loss}
        saved = schedule and {**schedule.state_dict(), "learning_rate": self._learning_rate}
        return {"args": arguments, "attributes": {"saved": saved}}

    # The Trainer's events

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check_trainer(args, state, **kwargs)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._check_trainer(args, state, **kwargs)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        resumed = self._saved_state(state) if state.global_step > 0 else None
        self._step_loss, self._reader, self._lacks_labels = MeanLoss(), LossReader(), False
        init = self._init
        if resumed is not None and init == "dataset":
            init = "first_batch"  # without effect: the moving average is restored
        elif init == "dataset":
            batch_size = _batch_size(args, state, loader)
            init, num_targets = mean_dataset_loss(model, loader, batch_size, args.device)
            logger.info(f"FINCH: mean loss before training {init:.4f} nats over {num_targets:,} target tokens")
        options = dict(self._options)
        if resumed and options["eta_base"] is None and resumed.get("learning_rate") == resumed["eta_base"]:
            options["eta_base"] = args.learning_rate  # the optimizer's groups have the first run's
        # Accelerate's wrapper hides what the optimizer supports.
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        warmup = self._options["warmup_steps"] or args.get_warmup_steps(state.max_steps)
        options |= {"warmup_steps": warmup, "total_steps": state.max_steps}
        self.schedule = FinchLR(optimizer, init=init, **options)
        is_warned = (self.schedule.ema_loss or 1.0) < 1.0  # by FinchLR
        if self.schedule.eta_base == self.schedule.eta_max == ETA_MAX and not is_warned:
            logger.warning(
                f"FINCH: learning_rate={args.learning_rate:g}, the Trainer's default, equals eta_max: below a loss of 1 nat the rate is constant. "
                "The paper's is 2e-5"
            )
        if resumed is not None:
            self.schedule.load_state_dict(resumed)
        self._learning_rate, self._smoothing = args.learning_rate, args.label_smoothing_factor
        is_smooth = self._checks_loss and state.global_step == 0 and self._smoothing > 0
        self._uniform_loss = MeanLoss() if is_smooth else None  # of the first step
        self._attach(model, optimizer, loader)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self._lacks_labels:
            raise UserError(_NO_LABELS)
        if self._step_loss.is_empty:
            raise UserError(
                "compute_loss_func: this step's loss did not reach FINCH; give the same ObjectiveLoss to the Trainer and to FinchCallback"
                if self._objective_loss is not None
                else "model: no forward pass of this step went through it, so that FINCH has no loss; the Trainer must call the model it was given"
            )
        self._reader.decide()
        self._loss, num_targets = self._step_loss.compute()
        self._smooth_loss = self._loss
        if self._uniform_loss is not None:
            self._smooth_loss = self._loss.lerp(self._uniform_loss.compute()[0], self._smoothing)
            self._uniform_loss = None
        self._was_stepped = False
        if not self.schedule.step(self._loss, num_targets):
            for optimizer in self.schedule.optimizers:
                optimizer.zero_grad(set_to_none=True)  # a parameter without gradient is not updated

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        if not self._was_stepped and not getattr(kwargs["optimizer"], "step_was_skipped", False):
            raise UserError(
                "optimizer: the Trainer stepped another one than FINCH sets the learning rate of; create it before Trainer.train(), by "
                "Trainer(optimizers=(optimizer, None))"
            )
        # What the Trainer logs next as the learning rate.
        lr_scheduler = kwargs["lr_scheduler"]
        lr_scheduler.load_state_dict({**lr_scheduler.state_dict(), "_last_lr": self.schedule.get_last_lr()})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._checks_loss and state.global_step == 1:
            control.should_log = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        _add_to_logs(logs, state, "ema_loss", self.schedule.ema_loss)
        if state.global_step == 1 and self._checks_loss and _reports_token_mean(args):
            self._check_loss(float(logs["loss"]), float(self._loss), float(self._smooth_loss))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        _remove_hooks(kwargs["model"])
        if isinstance(self._collate, _AddLabels):
            self._loader.collate_fn = self._collate.collate  # of a loader that the Trainer keeps

    def _check_trainer(self, args: TrainingArguments, state: TrainerState, **kwargs: Any) -> None:
        """Raises UserError where FINCH cannot work; before the first step, and where possible in the Trainer's constructor."""
        lr_scheduler, model, optimizer = (kwargs.get(key) for key in ("lr_scheduler", "model", "optimizer"))
        name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        if lr_scheduler is not None and not _is_constant(lr_scheduler):
            made = name if name != "constant" else type(lr_scheduler).__name__
            raise UserError(f"lr_scheduler={made}: {_CONSTANT}")
        if lr_scheduler is None and name != "constant":
            raise UserError(f"lr_scheduler_type={name}: {_CONSTANT}")
        if vars(state).setdefault("_finch", self) is not self:
            raise UserError(
                "callbacks: the Trainer has two FinchCallbacks, which would both set the learning rate; leave one out"
            )
        if args.n_gpu > 1:
            raise UserError(
                f"n_gpu={args.n_gpu}: DataParallel hides the losses of its replicas; start with torchrun or accelerate launch"
            )
        if args.restore_callback_states_from_checkpoint and self._objective_loss is not None:
            raise UserError(
                "restore_callback_states_from_checkpoint=True makes FinchCallback anew, without its compute_loss_func; leave it out: its state is restored anyway"
            )
        if getattr(args, "deepspeed_plugin", None) is not None:
            raise UserError(
                "deepspeed: it updates the weights inside the backward, before FINCH has the loss of the step; use fsdp=True"
            )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
        is_dummy = isinstance(optimizer, LayerWiseDummyOptimizer)
        name = "layerwise" if is_dummy else getattr(args.optim, "value", args.optim)
        if name.endswith(("layerwise", "lomo")):
            raise UserError(
                f"optim={name}: it updates the weights inside the backward, before FINCH has the loss of the step; use one that does not"
            )
        base: Any = getattr(model, "_orig_mod", model)  # of a compiled model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base  # of PEFT's wrapper
        names = [kind.__name__ for kind in type(base).__mro__]  # FSDP2 and users derive from transformers' classes
        is_seq2seq = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
        if is_seq2seq or any(map(_OTHER_HEAD.search, names)):
            raise UserError(f"model={names[0]}: FINCH follows a causal LM's token loss; use FinchLR with your own loss")

    def _attach(self, model: nn.Module, optimizer: Optimizer, loader: Any) -> None:
        _remove_hooks(model)  # left by a run that ended with an error
        loader = getattr(loader, "base_dataloader", loader)  # Accelerate's loaders read from this one
        # The labels of another iterable are seen where the model gets them.
        collate = getattr(loader, "collate_fn", None)
        if collate is not None and not isinstance(collate, _AddLabels):
            loader.collate_fn = collate = _AddLabels(collate)
        self._loader, self._collate = loader, collate
        self._labels: torch.Tensor | None = None
        _hooks[model] = [
            model.register_forward_pre_hook(self._take_labels, with_kwargs=True),
            model.register_forward_hook(self._add_loss, with_kwargs=True),
            optimizer.register_step_pre_hook(self._note_step),
        ]

    def _take_labels(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = kwargs.pop(_LABELS, None)
        if not is_replaying(module):
            self._labels = labels
        return args, kwargs

    def _add_loss(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # Without gradients it is not the pass that is trained on: evaluation, or one of TRL's for its metrics.
        if not module.training or not torch.is_grad_enabled() or is_replaying(module):
            return
        if self._objective_loss is not None:
            self._objective_loss.step_loss = self._step_loss
            return
        batch = {"labels": self._labels, **{name: value for name, value in kwargs.items() if value is not None}}
        if batch["labels"] is None and "shift_labels" not in batch:
            self._lacks_labels = True  # no error here: after an interrupt the hook is left in models that others train
            return
        self._step_loss.update(*self._reader.read(output, batch))
        if self._uniform_loss is not None and batch["labels"] is not None:
            self._uniform_loss.update(*uniform_loss(output.logits, shift(batch["labels"])))

    def _note_step(self, *args: Any) -> None:
        self._was_stepped = True

    def _check_loss(self, logged: float, loss: float, smooth: float) -> None:
        is_either = any(math.isclose(logged, each, rel_tol=_TOLERANCE, abs_tol=1e-3) for each in (loss, smooth))
        if is_either or not math.isfinite(loss):
            return
        if self._smoothing > 0:
            raise UserError(
                f"loss={logged:.4f}: the Trainer's loss is not the smoothed one of the next tokens, which is {smooth:.4f}: with label_smoothing_factor "
                "transformers shifts the labels only of a class that it knows by name, not of a compiled, FSDP2 or derived one; leave it out, or take "
                "SFTTrainer"
            )
        raise UserError(
            f"loss={logged:.4f}: the Trainer's loss is not the mean cross-entropy over the target tokens, which is {loss:.4f}; FINCH "
            "follows the latter: leave out the custom loss, use ObjectiveLoss, or pass check_loss=False if this is on purpose"
        )

    def _saved_state(self, state: TrainerState) -> dict[str, Any]:
        """FINCH's state in the checkpoint that the Trainer has resumed from."""
        kept: Any = state.stateful_callbacks
        saved = kept.get(type(self).__name__)
        if not saved or not saved["attributes"]["saved"]:
            raise UserError(
                f"resume_from_checkpoint: the checkpoint of step {state.global_step} was saved without FinchCallback; resume from another one, or "
                "start from its weights as a new run"
            )
        return dict(saved["attributes"]["saved"])


class SelfReplay(TrainerCallback):
    """Replays the pretrained model's own answers in each step, held to its distributions, as the recipe's ``self_replay``.

        Trainer(model, args, ..., processing_class=tokenizer, callbacks=[FinchCallback(...), SelfReplay(strength=0.3)])

    Before the first step the model answers prompts. Each training forward is then followed by one over this micro-batch's share of the
    step's replayed rows, and their term, strength x the mean KL over the replayed tokens of the step, joins its backward: the Trainer's own loss,
    its scaling and FINCH's loss stay the task's. The answers are in ``self_replay.safetensors`` in ``output_dir``, for a run that is resumed.
    ``replay_kl`` is in ``log_history``. Of a data set without a length the last step of an epoch replays for the micro-batches that come. One process, DDP and FSDP2; FSDP1, DeepSpeed and fp16 are refused.

    Args:
        prompts: ``"self"``: the model writes them after its chat template's beginning, or whole texts from BOS without one; or a list of texts, or
            the path of a file of them, as the recipe's ``self_replay.prompts``.
        rows, max_new_tokens, share, strength, temperature, top_k: see ``finch list keys self_replay``.
        seed: of the order of the rows.

    Raises:
        ValueError: an argument is out of range.
        UserError: a file of prompts that cannot be read. From ``train``: no tokenizer, a model or precision that is refused, a resumed run without its answers.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[str] | str | os.PathLike[str] = "self",
        rows: int = 128,
        max_new_tokens: int = 64,
        share: float = 0.25,
        strength: float = 0.3,
        temperature: float = 1.0,
        top_k: int = 512,
        seed: int = 0,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} must be above 0 and at most 1: replayed rows per row of the task")
        for name, value, least in (("strength", strength, 0), ("temperature", temperature, 0), ("rows", rows, 1)):
            if not (value >= least and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be finite and at least {least}")
        self._prompts: Any = prompts
        if isinstance(prompts, (str, os.PathLike)) and prompts != "self":
            self._prompts = [text for text, _ in _prompts_of(Path(prompts), rows)]
        self._num_rows, self._share, self._strength, self._seed = rows, share, strength, seed
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
        self._answers: list[Answer] = []
        self._of: Callable[[], Any] = lambda: None  # whose answers they are
        self._shares: list[list[Answer]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        model, tokenizer = kwargs["model"], kwargs.get("processing_class")
        if getattr(args, "deepspeed_plugin", None) or has_module(model, FullyShardedDataParallel):
            raise UserError(
                "SelfReplay runs the model twice in a step, which FSDP1 and DeepSpeed do not allow here; use DDP or FSDP2, or finch's recipe"
            )
        if args.n_gpu > 1:
            raise UserError(
                f"n_gpu={args.n_gpu}: SelfReplay cannot run the replicas of DataParallel; start with torchrun or accelerate launch"
            )
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise UserError(
                "SelfReplay shards the replayed rows over the ranks, which tensor parallel does not support; use DDP or FSDP2"
            )
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)  # of `accelerate launch --mixed_precision fp16`
        if args.fp16 or scaler is not None:
            raise UserError("fp16 scales the loss, which SelfReplay's term would not follow; use bf16")
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        if args.world_size > 1 and checkpointing.get("use_reentrant"):
            raise UserError(
                "gradient_checkpointing_kwargs: use_reentrant=True with DDP allows one pass in a step, and SelfReplay runs two; set it to False"
            )
        if vars(state).setdefault("_self_replay", self) is not self:
            raise UserError(
                "callbacks: the Trainer has two SelfReplay callbacks, of which one would train; leave one out"
            )
        file = Path(args.output_dir or "") / ANSWERS_FILE
        if state.global_step == 0 and tokenizer is None:
            raise UserError("SelfReplay needs the tokenizer: Trainer(processing_class=tokenizer)")
        settings = _digest((self._prompts, self._num_rows, self._options))
        make = functools.partial(self._generate, model, tokenizer)
        self._answers = _kept(file, args, state, make, self._answers if self._of() is model else [], settings)
        self._of = weakref.ref(model)
        loader = kwargs["train_dataloader"]
        self._is_within_epoch = state.global_step > 0 and not args.ignore_data_skip
        self._is_sharded = has_module(model, FSDPModule)
        self._micro_batches = len(loader) if has_length(loader) else None
        self._batch_size = _batch_size(args, state, loader)
        _remove_replay_hook(model)  # left by a run that ended with an error
        _replay_hooks[model] = model.register_forward_hook(self._add_term)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        # A resumed run goes on in the middle of an epoch, unless it skips no rows; and a callback may end an epoch early.
        self._epoch_start = 0 if self._is_within_epoch else state.global_step
        self._is_within_epoch = False

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        number = args.gradient_accumulation_steps
        if self._micro_batches is not None:  # fewer in the last step of an epoch
            done = (state.global_step - self._epoch_start) % -(-self._micro_batches // number) * number
            number = min(number, self._micro_batches - done)
        slots = number * args.world_size
        # With split_batches a loader's batch is that of all ranks.
        ranks = 1 if getattr(args.accelerator_config, "split_batches", False) else args.world_size
        full = args.gradient_accumulation_steps * ranks * self._batch_size
        rows = step_rows(self._answers, state.global_step, number=rows_in_step(self._share, full), seed=self._seed)
        self._shares = [rows[slot::slots] for slot in range(args.process_index, slots, args.world_size)]
        self._num_tokens, self._kl = sum(len(row.top) for row in rows), torch.zeros((), device=args.device)
        self._scale = self._strength * args.world_size / self._num_tokens
        self._loader, self._has_replayed = GradientState().active_dataloader, False

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if not self._has_replayed:
            raise UserError(
                "model: no training forward of this step went through it, so that nothing was replayed; the Trainer must call the model it was given, in "
                "training mode"
            )
        if has_ranks():
            distributed.all_reduce(self._kl)
        self._kl /= self._num_tokens

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        if logs is not None and "loss" in logs:
            _add_to_logs(logs, state, "replay_kl", float(self._kl))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._answers = []
        _remove_replay_hook(kwargs["model"])

    def _generate(self, model: Any, tokenizer: Any) -> list[Answer]:
        stops = _stop_tokens(model, tokenizer)
        before, after = around_user_turn(tokenizer)
        if self._prompts != "self":
            return own_answers(
                model, [_prompt(tokenizer, text) for text in self._prompts], stop_tokens=stops, **self._options
            )
        if after is None:
            return own_answers(model, [before] * self._num_rows, stop_tokens=stops, **self._options)
        ends = [*stops, after[0]]
        turns = answer_tokens(
            model,
            [before] * self._num_rows,
            stop_tokens=ends,
            max_new_tokens=self._options["max_new_tokens"],
            temperature=self._options["temperature"] or 1.0,
            stream=1,
        )
        prompts = [end_turn([*before, *turn], ends, after) for turn in turns]
        return own_answers(model, prompts, stop_tokens=stops, **self._options)

    def _add_term(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_replaying(module) or not module.training or not torch.is_grad_enabled() or not self._shares:
            return output
        if GradientState().active_dataloader is not self._loader:  # of another Trainer, after an interrupt of this one
            return output
        rows, self._has_replayed = self._shares.pop(0), True
        if rows or self._is_sharded:  # FSDP2's passes are collectives: a share without rows runs one of no weight
            kl = replay_kl_sum(module, rows or self._answers[:1]) * bool(rows)
            self._kl += kl.detach()
            term, is_done = kl * self._scale, [False]
            for name, value in output.items():  # nobody knows which of them the Trainer makes its loss of
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    output[name] = _WithTerm.apply(value, term, is_done)
        return output


class ForgettingCallback(TrainerCallback):
    """Measures what a model forgets while it is tuned: the KL divergence from the pretrained model on that model's own answers, by skill.

        trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
        trainer.add_callback(ForgettingCallback(trainer, every_n_steps=50, budget=0.2))

    Before the first step the model answers prompts, greedily. There, after every n steps and at the end ``forgetting/kl``, in nats per token, its
    95% interval and ``forgetting/kl/SKILL`` are in the Trainer's log, where W&B, TensorBoard and trackio find them. The same as the recipe's
    probe of kind self. The answers are in ``forgetting.safetensors`` in ``output_dir``, for a run that is resumed. Every rank measures all
    of them: one process, DDP and FSDP2.

    Args:
        trainer: whose log is written.
        prompts: a list of texts, or the path of a file of them, whose field ``skill`` groups them; None: finch's own rows of twelve skills.
        rows: how many; None: 96.
        every_n_steps: None: ten times in a run.
        max_new_tokens, top_k: see ``finch list keys probes``.
        budget: the largest KL; None: none.
        action: at a larger one: ``"note"``, a warning, or ``"stop"``, which ends the run after that step.

    Attributes:
        metrics: what was measured last, the intervals of all skills included; see :func:`finch.objectives.divergence.divergence`.

    Raises:
        ValueError: an argument is out of range.
        UserError: a file of prompts that cannot be read. From ``train``: no tokenizer, DeepSpeed, a resumed run without its answers.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        prompts: Sequence[str] | str | os.PathLike[str] | None = None,
        rows: int | None = None,
        every_n_steps: int | None = None,
        max_new_tokens: int = 64,
        top_k: int = 512,
        budget: float | None = None,
        action: str = "note",
    ) -> None:
        if action not in ("note", "stop"):
            raise ValueError(f"action={action!r} must be 'note' or 'stop'")
        for name, value in (("rows", rows), ("every_n_steps", every_n_steps), ("budget", budget)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        number = rows or _NUM_MEASURED
        if prompts is None:
            found: list[tuple[Any, Any]] = [
                (row.get("messages") or row["question"], row["skill"]) for row in skill_rows(number)
            ]
        elif isinstance(prompts, (str, os.PathLike)):
            found = [(text, row.get("skill")) for text, row in _prompts_of(Path(prompts), number)]
        else:
            found = [(text, None) for text in prompts[:number]]
        self._prompts = [text for text, _ in found]
        self._groups = [str(skill) for _, skill in found] if any(skill is not None for _, skill in found) else []
        self._trainer, self._every_n_steps, self._budget, self._action = trainer, every_n_steps, budget, action
        self._max_new_tokens, self._top_k = max_new_tokens, top_k
        self._answers: list[Answer] = []
        self._of: Callable[[], Any] = lambda: None  # whose answers they are
        self.metrics: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        model, tokenizer = kwargs["model"], kwargs.get("processing_class")
        if getattr(self._trainer, "state", state) is not state:
            raise UserError(
                "ForgettingCallback(trainer) was given another Trainer than the one that it is added to; give that one"
            )
        if tokenizer is None:
            raise UserError("ForgettingCallback needs the tokenizer: Trainer(processing_class=tokenizer)")
        if getattr(args, "deepspeed_plugin", None) is not None:
            raise UserError(
                "ForgettingCallback runs the model by itself, which DeepSpeed does not allow; use DDP or FSDP2"
            )
        file = Path(args.output_dir or "") / MEASURED_FILE
        prompts = [_prompt(tokenizer, each) for each in self._prompts]
        options = {"max_new_tokens": self._max_new_tokens, "top_k": self._top_k}
        stops = _stop_tokens(model, tokenizer)
        make = functools.partial(measured_answers, model, prompts, stop_tokens=stops, **options)
        settings = _digest((self._prompts, options))  # of the texts: a chat template may write the date
        self._answers = _kept(file, args, state, make, self._answers if self._of() is model else [], settings)
        self._of = weakref.ref(model)
        self._interval = self._every_n_steps or math.ceil(state.max_steps / 10)
        return self._measure(model, state, control, kwargs.get("optimizer"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        is_due = state.global_step % self._interval == 0 or state.global_step == state.max_steps
        return self._measure(kwargs["model"], state, control, kwargs.get("optimizer")) if is_due else control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_best = args.load_best_model_at_end  # loaded by now, so that the optimizer must not change it
        if self._step != state.global_step or is_best:
            self._measure(kwargs["model"], state, control, None if is_best else kwargs.get("optimizer"))
        interval = f" [{self.metrics['kl_low']:.4f}, {self.metrics['kl_high']:.4f}]" if "kl_low" in self.metrics else ""
        self._answers, moved = [], describe(self.metrics)
        logger.info(f"forgetting: KL {self.metrics['kl']:.4f}{interval} nats per token{moved and f'; {moved}'}")

    def _measure(self, model: Any, state: TrainerState, control: TrainerControl, optimizer: Any) -> TrainerControl:
        self._step = state.global_step
        # As before the Trainer's evaluation: a schedule-free optimizer trains other weights than those that are kept. The next step calls train().
        if callable(getattr(optimizer, "eval", None)):
            optimizer.eval()
        counts = [len(answer.top) for answer in self._answers]
        self.metrics = divergence(answer_kl(model, self._answers), counts, self._groups)
        shown = {
            f"forgetting/{key}": value
            for key, value in self.metrics.items()
            if not key.startswith(("kl_low/", "kl_high/"))
        }
        # The Trainer's own log, since TRL's would empty its running means into it; and it takes the step's own line as logged.
        should_log = control.should_log
        Trainer.log(self._trainer, shown)
        control.should_log = should_log
        if self._budget is not None and self.metrics["kl"] > self._budget:
            stops = self._action == "stop"
            end = "; the run ends" if stops else ""
            logger.warning(
                f"forgetting: KL {self.metrics['kl']:.4f} at step {self._step} is above budget={self._budget:g}{end}"
            )
            control.should_training_stop = control.should_training_stop or stops
        return control


class _WithTerm(torch.autograd.Function):
    """A tensor whose backward also differentiates ``term``, however the Trainer scales what it makes of the tensor. Of several with the same
    ``is_done`` the first does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, term: torch.Tensor, is_done: list[bool]) -> torch.Tensor:
        ctx.save_for_backward(term)
        ctx.is_done = is_done
        return value.clone() if value.dim() == 0 else value.view_as(value)  # the Trainer scales its loss in place

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (term,) = ctx.saved_tensors
        is_first, ctx.is_done[0] = not ctx.is_done[0], True
        return grad_output, torch.ones_like(term) if is_first else None, None


def mean_dataset_loss(model: nn.Module, loader: Any, batch_size: int, device: torch.device) -> tuple[float, int]:
    """One pass in evaluation mode over the rows of a loader, each once, shared by the ranks.

    The pass has a separate loader, without shuffling, so that the training order and the global random state stay as they are. Every
    rank runs the same number of forward passes, since those of a sharded model are collective.

    Returns the mean over the target tokens in nats, and their number; the same on every rank. Raises UserError if the loader reads
    no rows, or the dataset has no length, labels or target tokens.
    """
    if getattr(loader, "batch_sampler", None) is None:
        raise UserError(
            f"init=dataset: the {type(loader).__name__} of training has batches, not rows that a pass could read; pass the mean loss as a number, "
            "or init='first_batch'"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(
            f"init=dataset: {type(dataset).__name__} has no length, so a pass over all rows may never end; pass the mean loss as a number, "
            "or init='first_batch'"
        )
    is_parallel = has_ranks()
    rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if is_parallel else (0, 1)
    starts = range(rank * batch_size, len(dataset) + rank * batch_size, batch_size * num_ranks)
    shares = [list(range(start, min(start + batch_size, len(dataset)))) for start in starts]
    rows = DataLoader(
        dataset,
        batch_sampler=[share or [0] for share in shares],  # a rank without rows reads any row and does not count it
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        generator=torch.Generator(),
    )
    step_loss, reader = MeanLoss(), LossReader()
    with evaluating(model):
        for share, batch in zip(shares, rows, strict=True):
            if not isinstance(batch, Mapping) or not batch.keys() & {"labels", "shift_labels"}:
                raise UserError(_NO_LABELS)
            batch = send_to_device(batch, device)
            loss_sum, num_targets = reader.read(model(**batch), batch)
            reader.decide()
            step_loss.update(loss_sum, num_targets if share else 0)
    loss, num_targets = step_loss.compute()
    if num_targets == 0:
        raise UserError(
            "init=dataset: the training rows have no target token (label -100 everywhere); check the data collator"
        )
    return float(loss), int(num_targets)


def around_user_turn(tokenizer: Any) -> tuple[list[int], list[int] | None]:
    """The tokens before a user turn's text and those between it and the answer, where the template ends turns by a special token; else BOS
    (EOS where there is none) and None."""
    before, after = _around_text(tokenizer, {"role": "user"})
    if after:
        return before, after
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id], None


def _around_text(tokenizer: Any, *turns: dict[str, str]) -> tuple[list[int], list[int]]:
    """The tokens before and after the last turn's text; none where the template ends turns by no special token."""
    if getattr(tokenizer, "chat_template", None):
        one, other = (_prompt(tokenizer, [*turns[:-1], {**turns[-1], "content": text}]) for text in ("7", "z"))
        before, after = around_content(one, other)
        if after and after[0] in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
            return before, after
    return [], []


def _kept(
    file: Path,
    args: TrainingArguments,
    state: TrainerState,
    make: Callable[[], list[Answer]],
    earlier: list[Answer],
    digest: str,
) -> list[Answer]:
    """The pretrained model's answers: made where the run begins, read where it is resumed, and kept where a smaller batch is tried, since the Trainer
    goes on with the weights of then. ``digest``: of prompts and settings, which a resumed run must have too."""
    if args.auto_find_batch_size and earlier:
        return earlier
    if state.global_step > 0:
        if not file.is_file():
            raise UserError(
                f"{file} is missing: the answers of the pretrained model, which this resumed run no longer has; start a new run"
            )
        if digest_of(file) != digest:
            raise UserError(f"{file} has the answers to other prompts, or of other settings; resume with the same ones")
        return read_answers(file)
    found = [make()]
    if has_ranks():  # the same on all, which a tie could keep them from
        distributed.broadcast_object_list(found)
    [answers] = found
    if state.is_world_process_zero:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_answers(answers, file, digest)
    return answers


def _digest(settings: Any) -> str:
    return hashlib.sha256(repr(settings).encode()).hexdigest()


def _batch_size(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    if not args.auto_find_batch_size:
        return args.per_device_train_batch_size
    # In a resumed run the state has its checkpoint's, also where a smaller one is tried.
    found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found or state.train_batch_size or args.per_device_train_batch_size


def _stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or tokenizer.eos_token_id
    stops = [found] if isinstance(found, int) else list(found or [])
    after = _around_text(tokenizer, {"role": "user", "content": "7"}, {"role": "assistant"})[1]
    return [*stops, *(token for token in after[:1] if token not in stops)]


def _prompts_of(file: Path, number: int) -> list[tuple[str, Mapping[str, Any]]]:
    """The first texts of a file and their rows; raises UserError where there are none."""
    require_extras("A file of prompts", "torchtune")
    from finch.data.prompts import PROMPT_COLUMNS, load_rows

    try:
        rows = load_rows(str(file), None, None, "train", number)
    except UserError as error:
        raise error.under(f"prompts={file}", data_files="prompts") from error
    texts = [[row[name] for name in PROMPT_COLUMNS if isinstance(row.get(name), str)] for row in rows]
    if [] in texts:
        row = texts.index([]) + 1
        raise UserError(f"prompts={file}: row {row} has none of the fields {', '.join(PROMPT_COLUMNS)}; give it one")
    return [(first, row) for (first, *_), row in zip(texts, rows, strict=True)]


def _prompt(tokenizer: Any, content: str | list[dict[str, str]]) -> list[int]:
    """A user's turn, or a conversation that ends with one, up to where the answer begins, as the recipe renders it."""
    turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not getattr(tokenizer, "chat_template", None):
        ends = {"assistant": tokenizer.eos_token}
        lines = [
            f"{turn['role'].capitalize()}: {turn['content'].strip()}{ends.get(turn['role']) or ''}" for turn in turns
        ]
        return list(tokenizer("\n".join([*lines, "Assistant:"]))["input_ids"])
    generation = turns[-1]["role"] == "user"
    options = {"add_generation_prompt": generation, "enable_thinking": False, "tokenize": False}
    text = tokenizer.apply_chat_template(turns, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _AddLabels:
    """A collator that adds a batch's labels a second time: the Trainer removes the first where it computes the loss itself."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if "labels" in batch:
            batch[_LABELS] = batch["labels"]
        return batch


_NO_LABELS = (
    "labels: they did not reach the model, so that FINCH cannot see the loss; the data collator must return them, and a custom "
    "compute_loss must pass on the complete batch"
)
_CONSTANT = "FINCH is the only one to set the learning rate; pass TrainingArguments(lr_scheduler_type='constant') and no scheduler object; for warm-up TrainingArguments(warmup_steps=)"


def _add_to_logs(logs: dict[str, Any], state: TrainerState, name: str, value: float | None) -> None:
    """To what callbacks after this one see, and to ``log_history``."""
    lines: tuple[dict[str, Any], ...] = (logs, state.log_history[-1])
    for line in lines:
        line[name] = value


def _is_constant(lr_scheduler: Any) -> bool:
    return isinstance(lr_scheduler, LambdaLR) and all(
        factor(step) == 1 for factor in lr_scheduler.lr_lambdas for step in (0, 1, 10, 1000, 10**6)
    )


def _reports_token_mean(args: TrainingArguments) -> bool:
    """Whether the Trainer's logged loss should be the mean over all target tokens of the step."""
    return args.average_tokens_across_devices or args.world_size == 1


def _remove_replay_hook(model: nn.Module) -> None:
    if (handle := _replay_hooks.pop(model, None)) is not None:
        handle.remove()


def _remove_hooks(model: nn.Module) -> None:
    for handle in _hooks.pop(model, ()):
        handle.remove()
