"""The keys as text, and what an unknown key's error suggests."""

import runpy
import subprocess
import sys

import pytest
from helpers.runs import MINIMAL, ROOT, finch
from omegaconf import OmegaConf

from finch.config.key_search import OTHER_NAMES, format_keys, key_hint, shown_keys
from finch.config.schema import COMPONENTS, FullFinetuneKeys, LoraFinetuneKeys, keys
from finch.config.validation import check
from finch.errors import UserError

FINCH = {"_component_": "finch.FinchLR", "eta_max": 5e-5}


def error_of(key):
    cfg = OmegaConf.create({**MINIMAL, "lr_scheduler": FINCH})
    OmegaConf.update(cfg, key, 1, force_add=True)
    with pytest.raises(UserError) as caught:
        check(cfg, FullFinetuneKeys)
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


def test_other_names_are_no_keys_and_name_existing_ones():
    known = {*LoraFinetuneKeys.model_fields, "method"}
    assert not known & set(OTHER_NAMES)
    for text in OTHER_NAMES.values():
        named = [part.partition("=")[0].rstrip(",;") for part in text.removeprefix("use ").split()]
        assert any(name.partition(".")[0] in known for name in named) or "leave it out" in text


def test_key_hint_without_a_near_name_is_empty():
    assert key_hint("ocean", FullFinetuneKeys.model_fields) == ""


def test_keys_lists_all_keys_without_importing_torch():
    code = "import sys; from finch.cli.main import main; main(['keys']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    arguments = [f"{model.key}.{name}" for model in COMPONENTS for name in keys(model)]
    assert sorted(listed) == sorted([*shown_keys(LoraFinetuneKeys), *arguments])
    assert "[True, False, auto or PATH; default: False]" in done.stdout


@pytest.mark.parametrize(
    ("word", "listed"),
    [
        (
            "Every_N",
            "validate_every_n_steps probes.NAME.every_n_steps probes_every_n_steps checkpoint.every_n_steps "
            "checkpoint.every_n_minutes log_every_n_steps",
        ),
        ("the paper clips", "clip_grad_norm"),
        ("eta_max", "lr_scheduler.eta_max"),
        ("lora_rank", "model.lora_rank model.lora_alpha"),
        ("objectives.TALR", "loss.tau loss.w_min"),
    ],
)
def test_keys_searches_names_and_descriptions(capsys, word, listed):
    code, out, _ = finch(capsys, "keys", word)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == listed.split()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("epocs", "no key contains epocs, did you mean epochs"),
        ("learning_rate", r"^no key contains learning_rate; use optimizer\.lr$"),
    ],
)
def test_keys_says_what_to_search_for(word, message):
    with pytest.raises(UserError, match=message):
        format_keys(word)


def test_recipe_page_lists_every_key():
    table = runpy.run_path(str(ROOT / "docs" / "keys.py"))["table"]()
    assert table.strip() in (ROOT / "docs" / "recipe.md").read_text()
    assert "| torch.nn.CrossEntropyLoss |" in table
