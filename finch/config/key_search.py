"""The keys as text: `finch list keys`, a recipe's ``--help``, and what to do about an unknown one. Loads without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from finch.config.instantiate import did_you_mean
from finch.config.schema import COMPONENTS, REQUIRED, SECTIONS, Key, Keys, Lora, keys

_FOREIGN_NAMES = {
    # learning rate and optimizer
    "use optimizer.lr": "learning_rate lr eta_base",
    "use optimizer, such as optimizer=torch.optim.AdamW": "optim",
    "use optimizer.betas": "adam_beta1 adam_beta2",
    "use optimizer.eps": "adam_epsilon",
    "use optimizer.weight_decay": "wd",
    "use clip_grad_norm": "max_grad_norm gradient_clipping",
    "use method=sft (cosine), method=finch, or the block lr_scheduler": "lr_scheduler_type",
    "use lr_scheduler.warmup_steps of FINCH, lr_scheduler.warmup_fraction of method=sft": "warmup_ratio warmup_steps num_warmup_steps",
    # length of the run
    "use epochs": "num_train_epochs num_epochs max_epochs",
    "use max_steps_per_epoch with epochs=1": "max_steps",
    # batch
    "use batch_size, samples per forward pass and rank": "per_device_train_batch_size micro_batch_size train_batch_size",
    "validation uses batch_size; leave it out": "per_device_eval_batch_size",
    "use batch_size x gradient_accumulation_steps x ranks": "global_batch_size",
    "use gradient_accumulation_steps": "grad_accum_steps",
    "use num_workers": "dataloader_num_workers",
    # model and memory
    "use checkpointer.checkpoint_dir and model": "model_name_or_path model_name model_dir model_path base_model pretrained_model_name_or_path",
    "use enable_activation_checkpointing": "gradient_checkpointing activation_checkpointing",
    "use dtype=bf16, or dtype=bf16_mixed for fp32 master weights": "bf16 torch_dtype mixed_precision precision",
    "fp16 is not trained here; use dtype=bf16, bf16_mixed or fp32": "fp16",
    "torch's scaled_dot_product_attention is always used; leave it out": "attn_implementation flash_attention flash_attn",
    "use compile": "torch_compile",
    "FSDP2 shards over all ranks that --nproc_per_node N starts; leave it out": "fsdp deepspeed",
    "weights are not quantized here; method=lora with dtype=bf16 saves memory": "load_in_4bit load_in_8bit",
    # data
    "use tokenizer.max_seq_len, in tokens": "max_seq_length max_length cutoff_len sequence_len",
    "use dataset.source=json and dataset.data_files": "dataset_path data_path train_file",
    "use dataset.source": "dataset_name",
    "use dataset.validation_fraction, with a dataset_validation block": "val_size val_set_size",
    "use dataset_validation": "eval_dataset",
    "use dataset.packed, with tokenizer.max_seq_len": "packing sample_packing",
    "use dataset.train_on_input": "train_on_inputs",
    # output
    "use output_dir": "run_dir",
    "use overwrite": "overwrite_output_dir",
    "use resume_from_checkpoint": "resume",
    "use checkpoint.every_n_steps": "save_steps",
    "use checkpoint.keep_last": "save_total_limit",
    "every epoch is saved; use checkpoint.every_n_steps to save within an epoch": "save_strategy",
    "use validate_every_n_steps, with dataset_validation": "eval_steps",
    "every epoch ends with a validation; use validate_every_n_steps to validate within an epoch": "eval_strategy",
    "use log_every_n_steps": "logging_steps",
    "use metric_logger=wandb, tensorboard, trackio or csv": "report_to wandb wandb_project",
    # methods
    "use method=lora": "finetuning_type adapter use_peft",
    "give method=lora, which has model.lora_rank": "lora_r lora_rank",
    "give method=lora, which has model.lora_alpha": "lora_alpha",
    "give method=lora, which has model.lora_dropout": "lora_dropout",
    "give method=lora, which has model.lora_attn_modules": "lora_target_modules",
}
"""What to do here, and the keys of TRL, LLaMA-Factory, axolotl or torchtune's older recipes that call for it."""

ADAMW = {
    "optimizer.lr": Key(
        "number > 0",
        REQUIRED,
        "the learning rate; under FinchLR eta_base, the rate at a loss of 1 nat: 2e-5 in the paper, auto chooses it",
    ),
    "optimizer.weight_decay": Key("number >= 0", 0.01, "torch's default; 0 in finch's configs"),
}
"""Those of torch.optim.AdamW's arguments that are searched for; other optimizers have other ones."""

OTHER_NAMES = {name: remedy for remedy, names in _FOREIGN_NAMES.items() for name in names.split()}


def key_hint(key: str, siblings: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """What to do about an unknown key, to be appended to the error; an empty string if no known name is near.

    Args:
        key: dotted path, such as ``optimizer.learning_rate``.
        siblings: the known names in the same block.
        elsewhere: known names of other blocks, and their dotted paths.
    """
    block, _, name = key.rpartition(".")
    prefix = f"{block}." if block else ""
    word, siblings, elsewhere = name.lower().replace("-", "_"), list(siblings), elsewhere or {}
    if word in OTHER_NAMES:
        return f"; {OTHER_NAMES[word]}"
    if word in elsewhere:
        return f", did you mean {elsewhere[word]}?"
    longer = [f"{prefix}{sibling}" for sibling in siblings if len(word) >= 3 and sibling.startswith(word)]
    # A single key that begins with the word is meant, though another one may be nearer by its letters.
    hint = "" if len(longer) == 1 else did_you_mean(word, siblings, prefix=prefix)
    if not hint and longer:  # difflib finds no name that is more than twice as long
        hint = f", did you mean {' or '.join(longer[:3])}?"
    # Stricter than among siblings: most keys of other blocks have nothing to do with the word.
    if not hint and (nearest := get_close_matches(word, elsewhere, n=1, cutoff=0.8)):
        hint = f", did you mean {elsewhere[nearest[0]]}?"
    return hint


def format_default(key: Key) -> str:
    if isinstance(key.default, dict):
        return key.default["_component_"]
    return {REQUIRED: "required", None: "null"}.get(key.default, str(key.default))


def shown_keys(model: type[Keys]) -> dict[str, Key]:
    """The keys that are listed: those of a block, such as ``checkpoint.every_n_steps``, in place of the block."""
    return {name: key for name, key in keys(model).items() if key.is_named or not key.block}


def recipe_help(recipe: str, model: type[Keys]) -> str:
    """What ``--help`` of a recipe prints."""
    sections: dict[str, type[Keys]] = {**SECTIONS, **({"LoRA": Lora} if issubclass(model, Lora) else {})}
    names = "\n".join(
        textwrap.fill(
            " ".join(section.model_fields), 120, initial_indent=f"  {title + ':':<26}", subsequent_indent=" " * 28
        )
        for title, section in sections.items()
    )
    return f"""usage: finch run [TORCHRUN-OPTIONS] NAME_OR_PATH [key=value ...] [~key] [method=NAME]
   or: tune run [TORCHRUN-OPTIONS] {recipe} --config NAME_OR_PATH [key=value ...] [~key] [method=NAME]

  --config NAME_OR_PATH     a YAML file, or the name of a config that comes with finch: `finch list configs`
  key=value                 overrides the file; optimizer.lr=1e-5 inside a block
  ~key                      removes a key or block
  method=NAME               trains with a method, or several joined by +: `finch list methods`

keys, described by `finch list keys`; `finch list keys WORD` searches them:
{names}"""


def all_keys() -> list[str]:
    """Every key of both recipes and of finch's components, as it is written on the command line."""
    sections: list[type[Keys]] = [*SECTIONS.values(), Lora]
    names = [*(name for model in sections for name in shown_keys(model)), *ADAMW]
    return names + [f"{model.key}.{name}" for model in COMPONENTS for name in keys(model)]
