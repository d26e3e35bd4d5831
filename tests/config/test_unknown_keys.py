"""What an unknown key's error suggests, without a run."""

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.config.key_help import format_keys
from finch.config.schema import FULL_FINETUNE, LORA_FINETUNE
from finch.config.unknown_keys import OTHER_NAMES, key_hint
from finch.config.validation import check
from finch.errors import UserError

FINCH = {"_component_": "finch.FinchLR", "eta_max": 5e-5}


def error_of(key):
    cfg = OmegaConf.create({**MINIMAL, "lr_scheduler": FINCH})
    OmegaConf.update(cfg, key, 1, force_add=True)
    with pytest.raises(UserError) as caught:
        check(cfg, FULL_FINETUNE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        # other trainers' words
        ("learning_rate", "use optimizer.lr"),
        ("lr", "use optimizer.lr"),
        ("Learning-Rate", "use optimizer.lr"),
        ("num_train_epochs", "use epochs"),
        ("per_device_train_batch_size", "use batch_size, samples per forward pass and rank"),
        ("micro_batch_size", "use batch_size, samples per forward pass and rank"),
        ("max_steps", "use max_steps_per_epoch with epochs=1"),
        ("max_seq_length", "use tokenizer.max_seq_len, in tokens"),
        ("cutoff_len", "use tokenizer.max_seq_len, in tokens"),
        ("sequence_len", "use tokenizer.max_seq_len, in tokens"),
        ("warmup_ratio", "use lr_scheduler.warmup_fraction, which method=sft has; FINCH has no warm-up"),
        ("gradient_checkpointing", "use enable_activation_checkpointing"),
        ("bf16", "use dtype=bf16, or dtype=bf16_mixed for fp32 master weights"),
        ("model_name_or_path", "use checkpointer.checkpoint_dir and model"),
        ("dataset_path", "use dataset.source=json and dataset.data_files"),
        ("eval_steps", "use validate_every_n_steps, with dataset_validation"),
        ("save_steps", "use checkpoint.every_n_steps"),
        ("logging_steps", "use log_every_n_steps"),
        ("packing", "use dataset.packed, with tokenizer.max_seq_len"),
        ("optimizer.learning_rate", "use optimizer.lr"),
        ("lr_scheduler.warmup_ratio", "use lr_scheduler.warmup_fraction, which"),
        # misspelt, or cut short
        ("epoch", "did you mean epochs?"),
        ("batchsize", "did you mean batch_size?"),
        ("dataset_va", "did you mean dataset_validation?"),
        ("dataset_valid", "did you mean dataset_validation?"),
        ("validation", "did you mean dataset_validation?"),
        ("checkpoint.keep", "did you mean checkpoint.keep_last?"),
        ("checkpoint.every", "did you mean checkpoint.every_n_steps or checkpoint.every_n_minutes?"),
        ("lr_scheduler.etamax", "did you mean lr_scheduler.eta_max?"),
        # in another block
        ("eta_max", "did you mean lr_scheduler.eta_max?"),
        ("weight_decay", "did you mean optimizer.weight_decay?"),
        ("weigth_decay", "did you mean optimizer.weight_decay?"),
        ("packed", "did you mean dataset.packed?"),
        ("every_n_steps", "did you mean checkpoint.every_n_steps?"),
        ("optimizer.clip_grad_norm", "did you mean clip_grad_norm?"),
        # nothing near
        ("ocean", "see `finch keys`"),
        ("training.steps", "see `finch keys`"),
        ("lr_scheduler.ocean", "finch.FinchLR accepts optimizer, eta_max, "),
    ],
)
def test_unknown_key_names_what_to_use(key, suggestion):
    error = error_of(key)
    assert error.startswith("unknown key ")
    assert suggestion in error
    assert "\n" not in error


@pytest.mark.parametrize("word", OTHER_NAMES)
def test_other_names_are_no_keys_and_name_existing_ones(word):
    assert word not in LORA_FINETUNE
    named = [part.partition("=")[0].rstrip(",;") for part in OTHER_NAMES[word].removeprefix("use ").split()]
    assert (
        any(name.partition(".")[0] in (*LORA_FINETUNE, "method") for name in named)
        or "leave it out" in OTHER_NAMES[word]
    )


def test_key_hint_without_a_near_name_is_empty():
    assert key_hint("ocean", FULL_FINETUNE) == ""


def test_keys_knows_other_names():
    with pytest.raises(UserError, match=r"^no key contains learning_rate; use optimizer\.lr$"):
        format_keys("learning_rate")
