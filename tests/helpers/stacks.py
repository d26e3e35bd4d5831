"""The same run in every training loop that finch serves, beside a plain one that nothing of finch is in.

64 rows in their order, 16 a step, AdamW without weight decay, clipping at 1. Each function returns the losses and learning rates of the
steps, and works on one process or, under torchrun, on each of several.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.distributed
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data.distributed import DistributedSampler

from benchmarks.tiny_job import make_config
from helpers.causal_lm import Row, collate, train_plainly

ETA_BASE, ETA_MAX, INIT, EPOCHS, BATCH = 1e-3, 2.5e-3, 3.0, 2, 16
REPLAY = {"rows": 6, "max_new_tokens": 12, "strength": 2.0}

Curves = tuple[list[float], list[float]]


def load(data: Path, distributed_config: Any = None) -> tuple[Any, list[Row]]:
    """stories260k and the first 64 rows of TOFU, the questions without loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "stories260k")
    options = {} if distributed_config is None else {"distributed_config": distributed_config}
    model = transformers.AutoModelForCausalLM.from_pretrained(data / "stories260k", dtype=torch.float32, **options)
    rows = []
    for line in (data / "tofu" / "full.jsonl").read_text().splitlines()[:64]:
        row = json.loads(line)
        question = tokenizer.encode(row["question"])
        answer = tokenizer.encode(" " + row["answer"], add_special_tokens=False)
        rows.append({"input_ids": question + answer, "labels": [-100] * len(question) + answer})
    return model, rows


def sums(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies, and number, of the target tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


@functools.cache
def run_reference(data: Path, num_shares: int = 1) -> Curves:
    found = train_plainly(*load(data), BATCH, ETA_BASE, ETA_MAX, init=INIT, epochs=EPOCHS, num_shares=num_shares)
    return found["loss"], found["lr"]


@functools.cache
def run_replay_reference(data: Path, number: int = 4) -> Curves:
    """With the term of finch.integrations.self_replay in the plain loop."""
    from finch.integrations.self_replay import own_answers, replay_kl, step_rows

    model, rows = load(data)
    answers, steps = own_answers(model, [[1]] * 6, stop_tokens=[2], max_new_tokens=12), itertools.count()
    found = train_plainly(
        model,
        rows,
        BATCH,
        ETA_BASE,
        ETA_MAX,
        init=INIT,
        epochs=EPOCHS,
        replay_kl=lambda: replay_kl(model, step_rows(answers, next(steps), number=number, seed=0)),
        strength=2.0,
    )
    return found["loss"], found["lr"]


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def trainer_options(folder: Path) -> dict[str, Any]:
    """Four rows a micro-batch."""
    options = {"output_dir": str(folder), "per_device_train_batch_size": 4, "learning_rate": ETA_BASE}
    options |= {"gradient_accumulation_steps": BATCH // 4 // world_size(), "lr_scheduler_type": "constant"}
    options |= {"num_train_epochs": EPOCHS, "logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    options |= {"use_cpu": True, "train_sampling_strategy": "sequential", "save_steps": 4}
    return options | ({"ddp_backend": "gloo"} if world_size() > 1 else {})


def curves(trainer: Any) -> Curves:
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [line["loss"] for line in lines], [line["learning_rate"] for line in lines]


def run_trainer(
    data: Path,
    folder: Path,
    resume: str | None = None,
    init: float | str = INIT,
    num_rows: int = 64,
    is_sharded: bool = False,
    fsdp: bool = False,
    is_replayed: bool = False,
    share: float = 0.25,
    measured: Path | None = None,
    **changes: Any,
) -> Curves:
    """``is_sharded``: with FSDP2, as transformers itself shards a model when it loads it; ``fsdp``: as Accelerate shards it, for what it takes for GPUs.
    ``measured``: prompts of a ForgettingCallback, whose part of the log is left in ``folder``/forgetting.json."""
    from finch.integrations.transformers import FinchCallback, SelfReplay

    config = transformers.distributed.DistributedConfig(fsdp_size=world_size()) if is_sharded else None
    model, rows = load(data, config)
    changes |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}} if fsdp else {}
    args = transformers.TrainingArguments(**{**trainer_options(folder), **changes})
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    callbacks = [
        FinchCallback(eta_max=ETA_MAX, init=init),
        *([SelfReplay(share=share, **REPLAY)] if is_replayed else []),
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "stories260k")
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=rows[:num_rows],
        data_collator=collate,
        callbacks=callbacks,
        processing_class=tokenizer,
    )
    if measured is not None:
        measure(trainer, measured)
    trainer.train(resume_from_checkpoint=resume)
    assert any(isinstance(module, FSDPModule) for module in trainer.model.modules()) == (is_sharded or fsdp)
    return curves(trainer)


def measure(trainer: Any, prompts: Path) -> None:
    from finch.integrations.transformers import ForgettingCallback

    class Keeping(ForgettingCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_train_end(args, state, control, **kwargs)
            lines = [line for line in state.log_history if "forgetting/kl" in line]
            Path(args.output_dir, "forgetting.json").write_text(json.dumps([*lines, self.metrics]))

    trainer.add_callback(Keeping(trainer, prompts=prompts, every_n_steps=4, max_new_tokens=6))


def run_sft_trainer(data: Path, folder: Path, is_replayed: bool = False, measured: Path | None = None) -> Curves:
    import datasets
    import trl

    from finch.integrations.transformers import FinchCallback, SelfReplay

    model, rows = load(data)
    args = trl.SFTConfig(
        **{**trainer_options(folder), "save_strategy": "no"}, max_length=None, gradient_checkpointing=False, bf16=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "stories260k")
    tokenizer.pad_token = tokenizer.unk_token
    trainer = trl.SFTTrainer(
        model,
        args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[*([SelfReplay(**REPLAY)] if is_replayed else []), FinchCallback(eta_max=ETA_MAX, init=INIT)],
    )
    if measured is not None:
        measure(trainer, measured)
    trainer.train()
    return curves(trainer)


def run_lightning(data: Path, folder: Path) -> Curves:
    import lightning.pytorch as pl

    from finch.integrations.lightning import FinchCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.rows = load(data)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss_sum, number = sums(self.model, batch)
            return loss_sum / number

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=ETA_BASE, weight_decay=0.0)

    class Noting(FinchCallback):
        losses: list[float]
        rates: list[float]

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            past = self.schedule.ema_loss
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
            self.losses.append((self.schedule.ema_loss - 0.9 * past) / 0.1)
            self.rates.append(optimizer.param_groups[0]["lr"])

    callback = Noting(eta_max=ETA_MAX, init=INIT)
    callback.losses, callback.rates = [], []
    module = Module()
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(module.rows, world_size(), int(os.environ.get("RANK", "0")), shuffle=False)
    batch_size = BATCH // world_size()
    loader = torch.utils.data.DataLoader(module.rows, batch_size=batch_size, sampler=sampler, collate_fn=collate)
    features = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    ranks = {"accelerator": "cpu", "devices": world_size(), "strategy": "ddp" if world_size() > 1 else "auto"}
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        callbacks=[callback],
        default_root_dir=folder,
        use_distributed_sampler=False,
        **dict.fromkeys(features, False),
        **ranks,
    )
    trainer.fit(module, loader)
    return callback.losses, callback.rates


def run_accelerate(data: Path, folder: Path) -> Curves:
    from accelerate import Accelerator

    from finch import FinchLR
    from finch.integrations.step_loss import MeanLoss

    accelerator = Accelerator(cpu=True)
    model, rows = load(data)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ETA_BASE, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule, step_loss = FinchLR(optimizer, eta_max=ETA_MAX, init=INIT), MeanLoss()
    losses, rates = [], []
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), 4 // world_size()):
            micro_batches = batches[start : start + 4 // world_size()]
            counts = [(batch["labels"][:, 1:] != -100).sum() for batch in micro_batches]
            num_targets = accelerator.reduce(sum(counts))
            for batch in micro_batches:
                loss_sum, number = sums(model, batch)
                accelerator.backward(loss_sum * accelerator.num_processes / num_targets)
                step_loss.update(loss_sum, number)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss, number = step_loss.compute()
            if schedule.step(loss, number):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            rates.append(schedule.get_last_lr()[0])
    return losses, rates


def token_rows(tokenizer: Any, data: str) -> list[dict[str, list[int]]]:
    """The rows of ``load`` as a dataset of torchtune's, whose labels are not shifted."""
    return [{"tokens": row["input_ids"], "labels": row["labels"]} for row in load(Path(data))[1]]


def recipe_config(data: Path, folder: Path, ranks: int) -> dict[str, Any]:
    """The same run of finch_full_finetune."""
    base = data / "stories260k"
    return make_config(
        base,
        data,
        folder / "run",
        model={"_component_": "finch.models.auto", "path": str(base)},
        tokenizer={"_component_": "finch.models.auto_tokenizer", "path": str(base)},
        dataset={"_component_": "helpers.stacks.token_rows", "data": str(data)},
        shuffle=False,
        batch_size=BATCH // ranks,
        epochs=EPOCHS,
        optimizer={"_component_": "torch.optim.AdamW", "lr": ETA_BASE, "weight_decay": 0.0, "fused": True},
        lr_scheduler={"_component_": "finch.FinchLR", "eta_max": ETA_MAX, "init": INIT},
    )


STACKS = {
    "Trainer": run_trainer,
    "SFTTrainer": run_sft_trainer,
    "Lightning": run_lightning,
    "Accelerate": run_accelerate,
}


def differences(one: Curves, other: Curves) -> tuple[float, float]:
    """The largest relative difference of the losses, and of the learning rates."""
    return tuple(max(abs(a - b) / b for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True))
