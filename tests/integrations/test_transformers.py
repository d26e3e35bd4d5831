"""FinchCallback on transformers' stock Trainer and on TRL's SFTTrainer, in one process."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from helpers.causal_lm import collate, finch_rates, make_model, make_token_rows, mean_loss
from helpers.models import peft_without_torchao, save
from helpers.rows import write_lines
from helpers.runs import ROOT
from helpers.tokenizers import write_qwen3_tokenizer
from tokenizers import Tokenizer, models
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from trl import SFTConfig, SFTTrainer

from benchmarks.tiny_text import WORDS
from finch.base import extras
from finch.base.errors import UserError
from finch.data.prompts import user_prompt
from finch.integrations.objective_loss import ObjectiveLoss
from finch.integrations.self_replay import answer_kl, measured_answers, own_answers, read_answers
from finch.integrations.transformers import (
    ANSWERS_FILE,
    FinchCallback,
    ForgettingCallback,
    SelfReplay,
    _prompt,
    _stop_tokens,
)
from finch.models import auto_tokenizer
from finch.objectives import DFT, EAFT, TALR, CrossEntropy

ETA_BASE, ETA_MAX = 1e-3, 1e-2
ROWS = make_token_rows(30)
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


def arguments(folder: Any, cls: Any = TrainingArguments, **changes: Any) -> Any:
    options = {"output_dir": str(folder), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    options |= {"learning_rate": ETA_BASE, "lr_scheduler_type": "constant", "max_steps": 6, "logging_steps": 1}
    options |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return cls(**{**options, **changes})


def make_trainer(folder: Any, *callbacks: Any, rows: Any = ROWS, model: Any = None, **changes: Any) -> Trainer:
    given = ("compute_loss_func", "optimizers", "eval_dataset")
    options = {name: changes.pop(name) for name in given if name in changes}
    cls, model = changes.pop("cls", Trainer), make_model() if model is None else model
    options |= {"train_dataset": rows, "data_collator": collate, "callbacks": list(callbacks)}
    return cls(model, arguments(folder, **changes), **options)


def finch(**options: Any) -> FinchCallback:
    return FinchCallback(**{"eta_max": ETA_MAX, "init": 4.0, **options})


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [line[name] for line in trainer.state.log_history if "loss" in line]


def train(folder: Any, callback: FinchCallback, **changes: Any) -> Trainer:
    trainer = make_trainer(folder, callback, **changes)
    trainer.train()
    return trainer


@pytest.mark.parametrize("init", ["dataset", "first_batch", 4.0])
def test_rates_equal_the_scalar_reference(init, tmp_path):
    trainer = train(tmp_path, finch(init=init), rows=ROWS[:-1])
    start = {"dataset": mean_loss(make_model(), ROWS[:-1]), "first_batch": None}.get(init, init)
    expected = finch_rates(logged(trainer), ETA_BASE, ETA_MAX, start)
    assert logged(trainer, "learning_rate") == pytest.approx(expected, rel=1e-6)
    assert logged(trainer, "ema_loss")[-1] == pytest.approx((ETA_BASE / expected[-1]) ** 2, rel=1e-5)


def test_warmup_decay_and_defaults(tmp_path, caplog):
    warm = train(tmp_path / "warm", finch(warmup_steps=4))
    shares = [0.25, 0.5, 0.75, 1, 1, 1]
    expected = finch_rates(logged(warm), ETA_BASE, ETA_MAX, 4.0)
    assert logged(warm, "learning_rate") == pytest.approx(
        [a * b for a, b in zip(shares, expected, strict=True)], rel=1e-6
    )
    # The Trainer's own keys do the same; FinchCallback's comes first.
    for callback, steps in ((finch(), 4), (finch(), 0.6), (finch(warmup_steps=4), 2)):
        again = train(tmp_path / "again", callback, warmup_steps=steps)
        assert logged(again, "learning_rate") == logged(warm, "learning_rate")
    factors = [1, 1, 1, 1, 2 / 3, 1 / 3]
    decayed = train(tmp_path / "decayed", finch(decay=0.5))
    expected = finch_rates(logged(decayed), ETA_BASE, ETA_MAX, 4.0)
    assert logged(decayed, "learning_rate") == pytest.approx(
        [a * b for a, b in zip(factors, expected, strict=True)], rel=1e-6
    )
    assert not caplog.records
    rate = TrainingArguments(str(tmp_path)).learning_rate
    callback = FinchCallback()
    train(tmp_path / "default", callback, learning_rate=rate, max_steps=1)
    assert [record.getMessage() for record in caplog.records if "equals eta_max" in record.getMessage()]
    assert callback.schedule.ema_loss == pytest.approx(mean_loss(make_model(), ROWS), rel=1e-2)


def test_own_answers_without_the_folders_penalties():
    found, model = [], make_model()
    penalties = {"repetition_penalty": 9.0, "min_new_tokens": 8, "no_repeat_ngram_size": 1, "num_beams": 2}
    for settings in (
        {},
        penalties,
        {"forced_eos_token_id": 7, "forced_bos_token_id": 6, "suppress_tokens": [*range(8, 40)]},
    ):
        model.generation_config = GenerationConfig(**settings)
        found.append(own_answers(model, [[1], [5, 2]], stop_tokens=[3], max_new_tokens=8))
        assert model.generation_config.to_diff_dict().items() >= settings.items()
    plain, *others = [[answer.tokens.tolist() for answer in answers] for answers in found]
    assert others == [plain, plain]


def test_compiled_model_has_no_graph_break(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train(tmp_path / "compiled", finch(), torch_compile=True, torch_compile_backend="eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert logged(compiled, "ema_loss") == pytest.approx(
        logged(train(tmp_path / "eager", finch()), "ema_loss"), rel=1e-5
    )


def test_optimizer_takes_the_logged_rate(tmp_path):
    taken = []

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            taken.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    model = make_model()
    parameters = list(model.parameters())
    optimizer = Noting([{"params": parameters[:1], "lr": ETA_BASE}, {"params": parameters[1:], "lr": ETA_BASE / 2}])
    trainer = train(tmp_path, finch(), model=model, optimizers=(optimizer, None))
    assert [rates[0] for rates in taken] == logged(trainer, "learning_rate")
    assert [rates[1] for rates in taken] == pytest.approx([rate / 2 for rate in logged(trainer, "learning_rate")])


def test_dataset_pass_leaves_the_run_as_it_was(tmp_path):
    """The number instead of the pass gives the same run, bit for bit: shuffling and dropout draw the same."""
    one = train(tmp_path / "one", callback := finch(init="dataset"))
    other = train(tmp_path / "other", finch(init=mean_loss(make_model(), ROWS)))
    assert logged(one)[:2] == logged(other)[:2]
    assert logged(one) == pytest.approx(logged(other), rel=1e-6)
    assert not callback.schedule.is_on_device


def test_loss_is_unweighted_with_label_smoothing(tmp_path):
    plain = train(tmp_path / "plain", callback := finch(), max_steps=1)
    changes = {"label_smoothing_factor": 0.2, "dataloader_num_workers": 1}
    smooth = train(tmp_path / "smooth", other := finch(), max_steps=1, **changes)
    assert logged(smooth)[0] != pytest.approx(logged(plain)[0], rel=1e-4)
    assert other.schedule.ema_loss == pytest.approx(callback.schedule.ema_loss, rel=1e-6)


def test_batch_size_is_found_for_the_pass_as_well(tmp_path):
    model = make_model()

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer = train(tmp_path, finch(init="dataset"), model=model, max_steps=2, **changes)
    assert len(logged(trainer)) == 2


def test_evaluation_does_not_count(tmp_path):
    plain = train(tmp_path / "plain", finch())
    changes = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_token_rows(8, seed=1)}
    evaluated = train(tmp_path / "evaluated", finch(), **changes)
    assert logged(evaluated, "learning_rate") == logged(plain, "learning_rate")


def test_resumes_bit_for_bit(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 3}
    straight = train(tmp_path / "straight", finch(init="dataset"), **changes)
    resumed = make_trainer(tmp_path / "straight", finch(init="dataset"), model=make_model(1), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    for name in ("loss", "learning_rate", "ema_loss"):
        assert logged(resumed, name) == logged(straight, name)
    for one, other in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_resume_takes_a_changed_learning_rate(tmp_path):
    """As a changed ``eta_base``; an optimizer of the user's keeps its own, as with torch's schedulers."""
    (straight := make_trainer(tmp_path / "run", finch(), **SAVED)).train()
    last = logged(straight, "ema_loss")[-1]
    resumed = make_trainer(
        tmp_path / "run", finch(), **{**SAVED, "save_steps": 3, "max_steps": 3, "learning_rate": 2 * ETA_BASE}
    )
    with pytest.warns(UserWarning, match=r"continues with eta_base=0.002 in place of 0.001"):
        resumed.train(resume_from_checkpoint=True)
    expected = finch_rates(logged(resumed)[2:], 2 * ETA_BASE, ETA_MAX, last)
    assert logged(resumed, "learning_rate")[2:] == pytest.approx(expected, rel=1e-6)
    again = make_trainer(
        tmp_path / "run", callback := finch(), **{**SAVED, "max_steps": 4, "learning_rate": 2 * ETA_BASE}
    )
    again.train(resume_from_checkpoint=True)
    assert callback.schedule.eta_base == 2 * ETA_BASE
    for rate, steps in ((ETA_BASE, 2), (2 * ETA_BASE, 3)):
        model, callback = make_model(), finch()
        given = {"optimizers": (torch.optim.AdamW(model.parameters(), lr=3e-3), None), "learning_rate": rate}
        trainer = make_trainer(tmp_path / "own", callback, model=model, **{**SAVED, **given, "max_steps": steps})
        trainer.train(resume_from_checkpoint=steps == 3 or None)
        assert callback.schedule.eta_base == 3e-3


def test_resume_needs_a_checkpoint_of_finch(tmp_path):
    make_trainer(tmp_path / "run", **SAVED).train()
    trainer = make_trainer(tmp_path / "run", finch(), **{**SAVED, "max_steps": 4})
    with pytest.raises(UserError, match=r"the checkpoint of step 2 was saved without FinchCallback"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("changes", [{}, {"restore_callback_states_from_checkpoint": True}, {"logging_strategy": "no"}])
def test_resume_takes_the_state_of_its_checkpoint(changes, tmp_path):
    """From any folder, whatever other callbacks log, next to another run's checkpoint of the same step; the Trainer may make a new callback."""

    class Noting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.log_history.append({"noted": state.global_step})

    def make(name: str, **options: Any) -> Trainer:
        trainer = make_trainer(tmp_path / name, finch(check_loss=False), **{**SAVED, **changes, **options})
        trainer.callback_handler.callbacks.insert(0, Noting())
        return trainer

    (one := make("one")).train()
    make("other", rows=ROWS[10:]).train()
    resumed = make("other", max_steps=3)
    steps: list[int] = []

    class Reading(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            [callback] = [each for each in resumed.callback_handler.callbacks if isinstance(each, FinchCallback)]
            steps.append(callback.schedule.state_dict())

    resumed.add_callback(Reading())
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    [schedule] = [each.schedule for each in one.callback_handler.callbacks if isinstance(each, FinchCallback)]
    assert steps == [schedule.state_dict()]


def test_training_twice_starts_from_the_base_rate(tmp_path):
    trainer = make_trainer(tmp_path, callback := finch(), max_steps=2)
    trainer.train()
    trainer.train()
    assert callback.schedule.eta_base == ETA_BASE
    assert callback.schedule.state_dict()["num_steps"] == 2


def test_step_without_targets_is_not_taken(tmp_path):
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in ROWS[:6]]
    model = make_model()
    before = [value.clone() for value in model.parameters()]
    train(tmp_path, callback := finch(), model=model, rows=rows, max_steps=1)
    assert callback.schedule.state_dict()["num_steps"] == 0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "objective", [CrossEntropy(), DFT(), EAFT(), TALR(tau=1.5)], ids=lambda value: type(value).__name__
)
def test_objective_trains_on_its_weights(objective, tmp_path):
    """One step of plain SGD against the objective's definition; FINCH sees the unweighted loss."""
    model, reference, rows, loss = make_model(), make_model(), ROWS[:6], ObjectiveLoss(objective)
    changes = {"learning_rate": 1.0, "max_grad_norm": 0, "optim": "sgd", "max_steps": 1}
    changes |= {"train_sampling_strategy": "sequential", "compute_loss_func": loss}
    train(tmp_path, callback := finch(compute_loss_func=loss, eta_max=1.0), model=model, **changes)
    total, number = 0.0, 0
    for row in rows:
        logits = reference(input_ids=torch.tensor([row["input_ids"]])).logits[:, :-1].float()
        targets = torch.tensor([row["labels"][1:]])
        losses = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="none", ignore_index=-100)[None]
        batch = {"labels": targets, "top_logits": logits.topk(20).values.detach()}
        total = total + (objective.weights(losses.detach(), batch) * losses).sum()
        number += int((targets != -100).sum())
    (total / number).backward()
    eta = finch_rates([mean_loss(reference, rows)], 1.0, 1.0, 4.0)[0]
    assert callback.schedule.get_last_lr()[0] == pytest.approx(eta, rel=1e-6)
    for tuned, base in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(tuned, base - eta * base.grad, rtol=1e-4, atol=1e-6)


def test_sft_trainer_variants_see_the_unweighted_loss(tmp_path):
    """test_equality has its rates; here the pass over its dataset, and losses that are not the mean over tokens."""
    start, loss = mean_loss(make_model(), ROWS), ObjectiveLoss(DFT())
    averages = []
    for name, options, changes in (
        ("plain", {"init": "dataset"}, {}),
        ("smooth", {"init": "dataset"}, {"label_smoothing_factor": 0.2}),
        ("dft", {"init": "dataset", "check_loss": False}, {"loss_type": "dft"}),
        ("objective", {"init": start, "compute_loss_func": loss}, {"compute_loss_func": loss}),
    ):
        trainer = sft(tmp_path / name, callback := finch(**options), **changes)
        trainer.train()
        averages.append(callback.schedule.ema_loss)
        if name == "plain":
            expected = finch_rates(logged(trainer), ETA_BASE, ETA_MAX, start)
            assert logged(trainer, "learning_rate") == pytest.approx(expected, rel=1e-6)
    assert averages == pytest.approx(averages[:1] * 4, rel=1e-6)


def sft(folder: Any, callback: FinchCallback, *, compute_loss_func: Any = None, **changes: Any) -> SFTTrainer:
    """One step on rows that are tokens already, with the smallest tokenizer that it accepts."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    options = {"max_length": None, "gradient_checkpointing": False, "bf16": False, "max_steps": 1, **changes}
    args, rows = arguments(folder, SFTConfig, **options), datasets.Dataset.from_list(ROWS)
    given = {"processing_class": tokenizer, "callbacks": [callback], "compute_loss_func": compute_loss_func}
    return SFTTrainer(make_model(), args, train_dataset=rows, **given)


# Mistakes


def lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def test_scheduler_other_than_constant_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^lr_scheduler_type=linear: .*lr_scheduler_type='constant'"):
        make_trainer(tmp_path, finch(), lr_scheduler_type="linear")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=ETA_BASE)
    constant = transformers.get_constant_schedule(optimizer)
    make_trainer(tmp_path, finch(), model=model, optimizers=(optimizer, constant))
    linear = transformers.get_linear_schedule_with_warmup(optimizer, 0, 9)
    with pytest.raises(UserError, match=r"^lr_scheduler=LambdaLR: FINCH is the only one to set"):
        make_trainer(tmp_path, finch(), model=model, optimizers=(optimizer, linear))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise"),
        ({"optim": "adalomo"}, "adalomo"),
        ({"optimizers": (LayerWiseDummyOptimizer(lr=ETA_BASE), None)}, "layerwise"),
    ],
)
def test_optimizer_that_steps_in_the_backward_is_refused(changes, name, tmp_path):
    with pytest.raises(UserError, match=f"^optim={name}: it updates the weights inside the backward"):
        make_trainer(tmp_path, finch(), **changes)


@pytest.mark.parametrize("wrap", [lambda model: model, lora, torch.compile], ids=["plain", "lora", "compiled"])
@pytest.mark.parametrize("head", ["TokenClassification", "SequenceClassification", "QuestionAnswering"])
def test_model_without_a_causal_loss_is_refused(head, wrap, tmp_path, monkeypatch):
    peft_without_torchao(monkeypatch)
    kind = getattr(transformers, f"LlamaFor{head}")
    own = type("Own", (kind,), {})  # as a user's, or FSDP2's
    with pytest.raises(UserError, match=r"^model=Own: FINCH follows a causal LM's token loss; use FinchLR with your"):
        make_trainer(tmp_path, finch(), model=wrap(own(make_model().config)))
    make_trainer(tmp_path, finch(), model=wrap(make_model()))


def test_sequence_to_sequence_model_is_refused(tmp_path):
    """Its labels are not shifted."""
    sizes = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(UserError, match=r"^model=T5ForConditionalGeneration: FINCH follows a causal LM's token loss"):
        make_trainer(tmp_path, finch(), model=model)


def test_finch_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match="two FinchCallbacks"):
        make_trainer(tmp_path, finch(), finch())
    trainer = make_trainer(tmp_path, finch())
    trainer.add_callback(finch())
    with pytest.raises(UserError, match="two FinchCallbacks"):
        trainer.train()


def test_optimizer_made_later_is_refused(tmp_path):
    class Replacing(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    trainer = make_trainer(tmp_path, finch(), Replacing())
    with pytest.raises(UserError, match="the Trainer stepped another one than FINCH"):
        trainer.train()


class SumLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 7, outputs) if return_outputs else outputs.loss * 7


def popped_labels(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def test_loss_other_than_the_token_mean_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^loss=\d.*not the mean cross-entropy over the target tokens"):
        train(tmp_path, finch(), cls=SumLoss)
    with pytest.raises(UserError, match=r"not the mean cross-entropy"):
        train(tmp_path, finch(), compute_loss_func=ObjectiveLoss(DFT()))
    train(tmp_path, finch(check_loss=False), cls=SumLoss)
    train(tmp_path, finch(), compute_loss_func=popped_labels)  # a custom loss that is the mean


def test_smoothed_loss_of_labels_that_are_not_shifted_is_refused(tmp_path):
    """transformers shifts them only for classes that it knows by name."""
    changes = {"label_smoothing_factor": 0.3, "max_steps": 1}
    for kind in (transformers.LlamaForCausalLM, type("Own", (transformers.LlamaForCausalLM,), {})):
        torch.manual_seed(0)
        model = kind(make_model().config)
        with torch.no_grad():  # of random weights both losses are that of a guess
            model.lm_head.weight.copy_(model.model.embed_tokens.weight).mul_(20)
        callback = finch(init="first_batch")
        if kind is transformers.LlamaForCausalLM:
            trainer = train(tmp_path, callback, model=model, **changes)
            assert logged(trainer) == pytest.approx([float(callback._smooth_loss)], rel=1e-4)
        else:
            with pytest.raises(UserError, match=r"^loss=\d.* is not the smoothed one of the next tokens"):
                train(tmp_path, callback, model=model, **changes)


def test_objective_that_the_trainer_lacks_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the same ObjectiveLoss to the Trainer"):
        train(tmp_path, finch(compute_loss_func=ObjectiveLoss(DFT())))


def test_labels_that_do_not_arrive_are_named(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(input_ids=inputs["input_ids"]).logits.mean()

    with pytest.raises(UserError, match=r"^labels: they did not reach the model"):
        train(tmp_path, finch(), cls=Own)


class UserLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return [collate(ROWS[start : start + 3]) for start in range(0, 12, 3)]


class ReadyBatches(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(UserLoader.get_train_dataloader(self), batch_size=None)


@pytest.mark.parametrize("batch", [{}, []], ids=["no labels", "no dict"])
def test_pass_over_rows_without_labels_names_them(batch, tmp_path):
    class Collated(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "data_collator": lambda rows: batch})

    with pytest.raises(UserError, match=r"^labels: they did not reach the model"):
        train(tmp_path, finch(init="dataset"), cls=Collated)


@pytest.mark.parametrize(("cls", "name"), [(UserLoader, "list"), (ReadyBatches, "DataLoader")])
def test_loader_of_ready_batches(cls, name, tmp_path):
    trainer = train(tmp_path, finch(), cls=cls)
    assert logged(trainer, "learning_rate") == pytest.approx(
        finch_rates(logged(trainer), ETA_BASE, ETA_MAX, 4.0), rel=1e-6
    )
    with pytest.raises(UserError, match=rf"^init=dataset: the {name} of training has batches, not rows"):
        train(tmp_path, finch(init="dataset"), cls=cls)


def replaying(folder: Any, *callbacks: Any, **changes: Any) -> Trainer:
    """A Trainer with a tokenizer of words."""
    trainer = make_trainer(folder, *callbacks, **changes)
    trainer.processing_class = trainer.callback_handler.processing_class = tokenizer_of_words()
    return trainer


def test_run_that_was_interrupted_leaves_the_model_to_others(tmp_path):
    class Interrupting(Trainer):
        calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:  # of the two micro-batches of a step
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    model, one_step = make_model(), {"max_steps": 1}
    changes = {"model": model, "cls": Interrupting, **one_step}
    with pytest.raises(KeyboardInterrupt):
        replaying(tmp_path / "broken", finch(), SelfReplay(rows=2, max_new_tokens=2), **changes).train()
    model.load_state_dict(make_model().state_dict())
    smoothed = {"label_smoothing_factor": 0.1, **one_step}  # the model gets no labels
    for each in (model, fresh := make_model()):
        replaying(tmp_path / "other", model=each, **smoothed).train()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
    replaying(tmp_path / "next", finch(), SelfReplay(rows=2, max_new_tokens=2), model=model, **one_step).train()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_replay_that_was_interrupted_has_no_answers_of_the_earlier_model(tmp_path):
    class Interrupting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    replay = SelfReplay(prompts=["a", "b"], max_new_tokens=4)
    changes = {"auto_find_batch_size": True, "max_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        replaying(tmp_path, replay, Interrupting(), **changes).train()
    other = make_model()
    with torch.no_grad():
        other.lm_head.weight.mul_(3)
    trainer = replaying(tmp_path, replay, model=other, **changes)
    trainer.train()
    assert logged(trainer, "replay_kl") == pytest.approx([0], abs=1e-6)


def test_replay_that_would_not_train_is_refused(tmp_path):
    class Evaluating(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model.eval(), *args, **kwargs)

    replay = SelfReplay(prompts=["a", "b"], max_new_tokens=2)
    with pytest.raises(UserError, match=r"^model: no training forward of this step .* nothing was replayed"):
        replaying(tmp_path, replay, cls=Evaluating).train()
    with pytest.raises(UserError, match="two SelfReplay callbacks"):
        replaying(tmp_path, replay, SelfReplay(prompts=["a"])).train()
    reentrant = {"use_reentrant": True}
    args: Any = SimpleNamespace(fp16=False, n_gpu=1, world_size=2, gradient_checkpointing_kwargs=reentrant)
    state: Any = SimpleNamespace()
    replicated: Any = SimpleNamespace(n_gpu=2)
    with pytest.raises(UserError, match=r"^n_gpu=2: SelfReplay cannot run the replicas of DataParallel"):
        replay.on_train_begin(replicated, state, model=make_model())
    with pytest.raises(UserError, match=r"^gradient_checkpointing_kwargs: use_reentrant=True with DDP"):
        replay.on_train_begin(args, state, model=make_model())
    with pytest.raises(UserError, match=r"^fp16 scales the loss"):
        replay.on_train_begin(args, state, model=make_model(), optimizer=SimpleNamespace(scaler=object()))


def test_deepspeed_and_fsdp1_are_refused(tmp_path):
    class Wrapped(FullyShardedDataParallel):
        __init__ = torch.nn.Module.__init__  # its own needs a GPU

    replay, measuring = SelfReplay(prompts=["a"], max_new_tokens=2), ForgettingCallback(None, prompts=["a"])
    for callback, words in ((finch(), "use fsdp=True"), (replay, "use DDP or FSDP2"), (measuring, "use DDP or FSDP2")):
        trainer = make_trainer(tmp_path, model=make_model())
        trainer.args.deepspeed_plugin = object()
        given: Any = {"model": trainer.model, "processing_class": tokenizer_of_words(), "optimizer": None}
        with pytest.raises(UserError, match=f"(?i)deepspeed.*{words}"):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, **given)
    model = Wrapped()
    model.inner = make_model()
    args: Any = SimpleNamespace()
    with pytest.raises(UserError, match="FSDP1 and DeepSpeed do not allow"):
        replay.on_train_begin(args, args, model=torch.nn.Sequential(model))


def test_loader_that_a_trainer_keeps_has_its_collator_again(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, finch(), max_steps=1)
    loader = trainer.get_train_dataloader()
    monkeypatch.setattr(trainer, "get_train_dataloader", lambda: loader)
    trainer.train()
    assert set(next(iter(loader))) == set(collate(ROWS[:2]))


def test_dataset_without_length_is_refused(tmp_path):
    rows = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(UserError, match=r"^init=dataset: \w+ has no length"):
        train(tmp_path, finch(init="dataset"), rows=rows)


def tokenizer_of_words() -> Any:
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, "?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")


def test_a_stream_is_replayed_to(tmp_path):
    """As the same rows in the same order with their number known."""
    kinds = {
        "known": datasets.Dataset.from_list(ROWS[:12]),
        "stream": datasets.Dataset.from_list(ROWS[:12]).to_iterable_dataset(),
    }
    found = []
    for name, rows in kinds.items():
        callbacks = [finch(), SelfReplay(prompts=["a", "b"], max_new_tokens=4, share=1.0)]
        changes = {"train_sampling_strategy": "sequential", "max_steps": 2}
        trainer = replaying(tmp_path / name, *callbacks, rows=rows, **changes)
        trainer.train()
        found.append([logged(trainer, key) for key in ("loss", "replay_kl")])
    assert found[0] == found[1]
    assert found[0][1][1] > 0


@pytest.mark.parametrize("is_split", [False, True])
def test_replayed_rows_are_a_share_of_the_batch_of_all_ranks(is_split):
    replay, found = SelfReplay(share=0.5), []
    replay._answers = own_answers(make_model(), [[1], [5, 2]], stop_tokens=[3], max_new_tokens=2)
    replay._micro_batches, replay._batch_size = None, 4
    for rank in range(2):
        options = {"gradient_accumulation_steps": 2, "device": "cpu", "world_size": 2, "process_index": rank}
        config = SimpleNamespace(split_batches=is_split)
        args: Any = SimpleNamespace(**options, accelerator_config=config)
        replay.on_step_begin(args, SimpleNamespace(global_step=0))  # type: ignore[arg-type]
        found += replay._shares
    assert sum(map(len, found)) == (4 if is_split else 8)


@pytest.mark.parametrize("skips", [False, True])
def test_resumed_run_replays_in_each_micro_batch_of_its_epochs(skips, tmp_path):
    """Three micro-batches in steps of two: the second of an epoch has one. A run that skips no rows starts an epoch anew."""
    replay, counts = SelfReplay(prompts=["a", "b"], max_new_tokens=2, share=1.0), []

    class Counting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            counts.append(len(replay._shares))

    for steps, resumed in ((1, None), (5, True)):
        changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, "ignore_data_skip": skips}
        trainer = replaying(tmp_path, finch(), replay, Counting(), rows=ROWS[:9], **changes)
        trainer.train(resume_from_checkpoint=resumed)
    assert counts == ([2, 2, 1, 2, 1] if skips else [2, 1, 2, 1, 2])


def test_epoch_that_is_ended_early_is_followed_by_a_whole_one(tmp_path):
    replay, counts = SelfReplay(prompts=["a", "b"], max_new_tokens=2, share=1.0), []

    class Ending(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            counts.append(len(replay._shares))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step == 1
            return control

    replaying(tmp_path, replay, Ending(), rows=ROWS[:9], max_steps=3).train()
    assert counts == [2, 2, 1]


def test_a_smaller_batch_that_is_tried_replays_the_first_models_answers(tmp_path):
    model, batches = make_model(), []

    def fail_once(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            batches.append(len(kwargs["input_ids"]))
            if len(batches) == 3:  # of the second step
                raise RuntimeError("CUDA out of memory.")

    model.register_forward_hook(fail_once, with_kwargs=True)
    replay = SelfReplay(prompts=["a", "b", "?"], max_new_tokens=4, share=1.0)
    before = replay._generate(make_model(), tokenizer_of_words())
    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = replaying(tmp_path, finch(), replay, model=model, max_steps=2, **changes)
    trainer.train()
    smaller = trainer._train_batch_size
    assert smaller < 4
    assert batches == [4, 4, 4, *[smaller] * 4]
    kept = read_answers(tmp_path / ANSWERS_FILE)
    assert [each.log_probs.tolist() for each in kept] == [each.log_probs.tolist() for each in before]


def test_resumed_run_that_tries_a_smaller_batch_replays_a_share_of_it(tmp_path):
    model, replay, counts = make_model(), SelfReplay(prompts=["a", "b"], max_new_tokens=2, share=1.0), []

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if "labels" in kwargs and len(kwargs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")

    class Counting(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            counts.append((trainer._train_batch_size, sum(map(len, shares))))

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            shares[:] = replay._shares

    shares: list[Any] = []
    changes = {
        "auto_find_batch_size": True,
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    for steps, resumed in ((1, None), (2, True)):
        trainer = replaying(tmp_path, finch(), replay, Counting(), model=model, max_steps=steps, **changes)
        trainer.train(resume_from_checkpoint=resumed)
        model.register_forward_pre_hook(fail, with_kwargs=True)
    assert counts == [(3, 3), (2, 2)]


def test_prompt_tuned_model_is_measured_at_its_answers():
    """Its logits begin with those of what it puts before its input."""
    model = make_model()

    class Tuned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.generate = model, model.generate

        def forward(self, **inputs: Any) -> Any:
            logits = self.model(**inputs).logits
            return SimpleNamespace(logits=torch.cat([logits.new_zeros(len(logits), 3, logits.shape[2]), logits], 1))

    options = {"stop_tokens": [3], "max_new_tokens": 6, "top_k": 8}
    plain, tuned = (measured_answers(each, [[1], [5, 2]], **options) for each in (model, Tuned()))
    assert all(torch.equal(one.log_probs, other.log_probs) for one, other in zip(plain, tuned, strict=True))
    plain, tuned = (own_answers(each, [[1], [5, 2]], **options) for each in (model, Tuned()))
    assert all(torch.equal(one.log_probs, other.log_probs) for one, other in zip(plain, tuned, strict=True))
    assert answer_kl(Tuned(), plain).abs().max() < 1e-5


def test_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "hf", ("no_such_package",))
    monkeypatch.delitem(sys.modules, "finch.integrations.transformers")
    with pytest.raises(UserError, match=r"^finch.integrations.transformers needs the hf extra: pip install"):
        importlib.import_module("finch.integrations.transformers")


def test_arguments_are_checked_at_once():
    with pytest.raises(ValueError, match=r"^ema=1.5 must lie in"):
        finch(ema=1.5)


def measured(folder: Any, **options: Any) -> Trainer:
    """A Trainer with ForgettingCallback on three prompts."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizer_of_words()
    changes = {name: options.pop(name) for name in ("max_steps", "save_strategy", "save_steps") if name in options}
    trainer = make_trainer(folder, finch(), **changes, **options.pop("trainer", {}))
    trainer.processing_class = trainer.callback_handler.processing_class = options.pop("tokenizer", tokenizer)
    trainer.add_callback(ForgettingCallback(trainer, **{"prompts": ["a", "b", "?"], "max_new_tokens": 4, **options}))
    return trainer


def test_prompts_and_stops_are_the_recipes(shared_data, tmp_path):
    """Without thinking, and also where the template closes a turn by another token than EOS; and without a template."""
    write_qwen3_tokenizer(tmp_path, WORDS)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    for folder, text in ((tmp_path, "<think>\n\n</think>\n\n"), (shared_data / "stories260k", "\nAssistant:")):
        tokenizer, own = transformers.AutoTokenizer.from_pretrained(folder), auto_tokenizer(str(folder))
        prompt = _prompt(tokenizer, "Who is Ann?")
        assert prompt == user_prompt("Who is Ann?", own)
        assert tokenizer.decode(prompt).endswith(text)
        assert sorted(_stop_tokens(None, tokenizer)) == own.stop_tokens


def test_forgetting_of_the_best_model_is_measured(tmp_path):
    """The one that is loaded at the end: here that of step 1, before a rate that destroys the model."""
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "eval_dataset": ROWS[:6]}
    changes = {"learning_rate": 1.0, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer = measured(tmp_path, every_n_steps=1, trainer=best | changes)
    trainer.train()
    values = [line["forgetting/kl"] for line in trainer.state.log_history if "forgetting/kl" in line]
    best_step = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    assert best_step < 3
    assert values[-1] == pytest.approx(values[best_step], rel=1e-5)


def test_forgetting_is_of_the_weights_that_a_schedule_free_optimizer_keeps(tmp_path):
    """Its ``eval`` puts them in the place of those that it trains, here further away; the Trainer calls it where it evaluates."""

    class Averaging(torch.optim.SGD):
        shift = 0.0

        def train(self) -> None:
            self._move(0.0)

        def eval(self) -> None:
            self._move(0.05)

        def _move(self, shift: float) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(torch.arange(parameter.shape[-1]) % 2 * (shift - self.shift))
            self.shift = shift

    model = make_model()
    optimizer = Averaging(model.parameters(), lr=ETA_BASE)
    optimizer.eval()  # the start is that of the answers
    changes = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS[:3], "optimizers": (optimizer, None)}
    trainer = measured(tmp_path, every_n_steps=1, max_steps=2, trainer={"model": model, **changes})
    trainer.train()
    answers = read_answers(tmp_path / "forgetting.safetensors")
    assert optimizer.shift == 0.05
    kept = answer_kl(model, answers).sum() / sum(len(answer.top) for answer in answers)
    assert forgotten(trainer)[2] == pytest.approx(float(kept), rel=1e-5)


def test_run_that_measures_is_resumed_on_another_day(tmp_path, monkeypatch):
    """Its chat template writes the date."""
    tokenizer = tokenizer_of_words()
    tokenizer.chat_template = "{{ 'a' if strftime_now('%d') == '01' else 'b' }}"
    found = []
    for day, resumed in ((1, None), (2, str(tmp_path / "checkpoint-2"))):
        today = SimpleNamespace(now=lambda day=day: datetime.date(2026, 1, day))
        monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", today)
        trainer = measured(tmp_path, tokenizer=tokenizer, **{**SAVED, "max_steps": 4 if resumed else 2})
        found.append(_prompt(tokenizer, "a"))
        trainer.train(resume_from_checkpoint=resumed)
    assert found == [[1], [2]]
    assert list(forgotten(trainer))[-1] == 4


def forgotten(trainer: Trainer) -> dict[int, float]:
    return {line["step"]: line["forgetting/kl"] for line in trainer.state.log_history if "forgetting/kl" in line}


def test_forgetting_is_logged_and_bounded(tmp_path, caplog):
    caplog.set_level("INFO")
    plain = train(tmp_path / "plain", finch())
    trainer = measured(tmp_path / "run")
    trainer.train()
    values = forgotten(trainer)
    assert list(values) == [0, 1, 2, 3, 4, 5, 6]
    assert values[0] == 0 < values[6]
    assert logged(trainer) == logged(plain)
    assert f"forgetting: KL {values[6]:.4f} nats per token" in caplog.text
    first = next(step for step, value in values.items() if value > values[6] / 2)
    for action, last in (("note", 6), ("stop", first)):
        caplog.clear()
        bounded = measured(tmp_path / action, budget=values[6] / 2, action=action, every_n_steps=1)
        bounded.train()
        assert max(forgotten(bounded)) == bounded.state.global_step == last
        assert f"at step {first} is above budget={values[6] / 2:g}" in caplog.text
    sparse = measured(tmp_path / "sparse", every_n_steps=4)
    sparse.train()
    assert list(forgotten(sparse)) == [0, 4, 6]


def test_model_that_cannot_answer_is_named(tmp_path):
    model = transformers.LlamaForSequenceClassification(make_model().config)
    for callback in (SelfReplay(), ForgettingCallback(None, prompts=["a"])):
        trainer = make_trainer(tmp_path, callback, model=model)
        trainer.processing_class = trainer.callback_handler.processing_class = tokenizer_of_words()
        with pytest.raises(UserError, match=r"^model=LlamaForSequenceClassification: it has no generate"):
            trainer.train()


def test_mistakes_of_measuring_are_named(tmp_path):
    for options, message in (
        ({"action": "end"}, "action='end' must be"),
        ({"budget": -1.0}, "budget=-1.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            measured(tmp_path, **options)
    with pytest.raises(UserError, match="ForgettingCallback needs the tokenizer"):
        measured(tmp_path, tokenizer=None).train()
    measured(tmp_path, **SAVED).train()
    (tmp_path / "forgetting.safetensors").rename(tmp_path / "moved")
    again = {"max_steps": 4}
    with pytest.raises(UserError, match=r"forgetting.safetensors is missing: the answers of the pretrained model"):
        measured(tmp_path, **again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "moved").rename(tmp_path / "forgetting.safetensors")
    with pytest.raises(UserError, match="has the answers to other prompts"):
        measured(tmp_path, prompts=["b"], **again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(UserError, match="or of other settings; resume with the same ones"):
        measured(tmp_path, max_new_tokens=5, **again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer = measured(tmp_path)
    trainer.callback_handler.callbacks[-1]._trainer = make_trainer(tmp_path)
    with pytest.raises(UserError, match=r"^ForgettingCallback\(trainer\) was given another Trainer"):
        trainer.train()


def test_examples_of_the_page_train_a_bf16_folder_without_a_pad_token_in_fp32(tmp_path, monkeypatch):
    """As Llama-3's."""
    save("qwen3 tied", tmp_path / "MODEL", vocab_size=320)
    write_qwen3_tokenizer(tmp_path / "MODEL", WORDS)
    for name, changes in (("config", {"dtype": "bfloat16"}), ("tokenizer_config", {"pad_token": None})):
        file = tmp_path / "MODEL" / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    write_lines(tmp_path / "rows.jsonl", *({"question": word, "answer": word} for word in ("a", "b c")))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(
        (ROOT / "docs/integrate.md").read_text().split("examples\n", 1)[1].split("```")[1].removeprefix("python\n"),
        names,
    )
    assert names["model"].dtype == torch.float32
    assert len(names["collator"](names["rows"])["labels"]) == 2


def test_finchs_own_prompts_are_of_twelve_skills(tmp_path):
    callback = ForgettingCallback(None)
    assert len(callback._prompts) == 96
    assert {callback._groups.count(skill) for skill in callback._groups} == {8}


def test_replayed_prompts_of_a_file(tmp_path):
    """A path is a file, as in the recipe, and not a text of letters."""
    (tmp_path / "prompts.txt").write_text("Why?\n\nHow?\n")
    write_lines(tmp_path / "rows.jsonl", {"question": "Who?", "answer": "I"}, {"text": "a"})
    assert SelfReplay(prompts=str(tmp_path / "prompts.txt"), rows=1)._prompts == ["Why?"]
    assert SelfReplay(prompts=tmp_path / "prompts.txt")._prompts == ["Why?", "How?"]
    for name, message in (
        ("rows.jsonl", "row 2 has none of the fields question, query, prompt, instruction; give it one"),
        ("absent.jsonl", "prompts=.*absent.jsonl does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            SelfReplay(prompts=tmp_path / name)
