"""The keys as text: `finch keys`, a recipe's ``--help``, and what to do about an unknown one. Loads without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from finch.config.instantiate import did_you_mean
from finch.config.schema import COMPONENTS, REQUIRED, SECTIONS, Key, Keys, Lora, keys
from finch.errors import UserError

_LR = "use optimizer.lr"
_WARMUP = "use lr_scheduler.warmup_fraction, which method=sft has; FINCH has no warm-up"
_MAX_SEQ_LEN = "use tokenizer.max_seq_len, in tokens"
_MICRO_BATCH = "use batch_size, samples per forward pass and rank"
_CHECKPOINT_DIR = "use checkpointer.checkpoint_dir and model"
_CHECKPOINTING = "use enable_activation_checkpointing"
_BF16 = "use dtype=bf16, or dtype=bf16_mixed for fp32 master weights"
_SAVE = "use checkpoint.every_n_steps"
_VALIDATE = "use validate_every_n_steps, with dataset_validation"
_DATA = "use dataset.source=json and dataset.data_files"
_VALIDATION_FRACTION = "use dataset.validation_fraction, with a dataset_validation block"
_PACKED = "use dataset.packed, with tokenizer.max_seq_len"
_LOGGER = "use metric_logger=torchtune.training.metric_logging.WandBLogger, or TensorBoardLogger"
_LORA = "use method=lora"
_QUANTIZED = "weights are not quantized here; method=lora with dtype=bf16 saves memory"
_RANKS = "FSDP2 shards over all ranks that --nproc_per_node N starts; leave it out"

OTHER_NAMES: dict[str, str] = {
    # learning rate and optimizer
    "learning_rate": _LR,
    "lr": _LR,
    "eta_base": _LR,
    "optim": "use optimizer, such as optimizer=torch.optim.AdamW",
    "adam_beta1": "use optimizer.betas",
    "adam_beta2": "use optimizer.betas",
    "adam_epsilon": "use optimizer.eps",
    "wd": "use optimizer.weight_decay",
    "max_grad_norm": "use clip_grad_norm",
    "gradient_clipping": "use clip_grad_norm",
    "lr_scheduler_type": "use method=sft (cosine), method=finch, or the block lr_scheduler",
    "warmup_ratio": _WARMUP,
    "warmup_steps": _WARMUP,
    "num_warmup_steps": _WARMUP,
    # length of the run
    "num_train_epochs": "use epochs",
    "num_epochs": "use epochs",
    "max_steps": "use max_steps_per_epoch with epochs=1",
    "max_epochs": "use epochs",
    # batch
    "per_device_train_batch_size": _MICRO_BATCH,
    "per_device_eval_batch_size": "validation uses batch_size; leave it out",
    "micro_batch_size": _MICRO_BATCH,
    "train_batch_size": _MICRO_BATCH,
    "global_batch_size": "use batch_size x gradient_accumulation_steps x ranks",
    "grad_accum_steps": "use gradient_accumulation_steps",
    "dataloader_num_workers": "use num_workers",
    # model and memory
    "model_name_or_path": _CHECKPOINT_DIR,
    "model_name": _CHECKPOINT_DIR,
    "model_dir": _CHECKPOINT_DIR,
    "model_path": _CHECKPOINT_DIR,
    "base_model": _CHECKPOINT_DIR,
    "pretrained_model_name_or_path": _CHECKPOINT_DIR,
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "bf16": _BF16,
    "torch_dtype": _BF16,
    "mixed_precision": _BF16,
    "precision": _BF16,
    "fp16": "fp16 is not trained here; use dtype=bf16, bf16_mixed or fp32",
    "attn_implementation": "torch's scaled_dot_product_attention is always used; leave it out",
    "flash_attention": "torch's scaled_dot_product_attention is always used; leave it out",
    "flash_attn": "torch's scaled_dot_product_attention is always used; leave it out",
    "torch_compile": "use compile",
    "fsdp": _RANKS,
    "deepspeed": _RANKS,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    # data
    "max_seq_length": _MAX_SEQ_LEN,
    "max_length": _MAX_SEQ_LEN,
    "cutoff_len": _MAX_SEQ_LEN,
    "sequence_len": _MAX_SEQ_LEN,
    "dataset_path": _DATA,
    "dataset_name": "use dataset.source",
    "data_path": _DATA,
    "train_file": _DATA,
    "val_size": _VALIDATION_FRACTION,
    "val_set_size": _VALIDATION_FRACTION,
    "eval_dataset": "use dataset_validation",
    "packing": _PACKED,
    "sample_packing": _PACKED,
    "train_on_inputs": "use dataset.train_on_input",
    # output
    "run_dir": "use output_dir",
    "overwrite_output_dir": "use overwrite",
    "resume": "use resume_from_checkpoint",
    "save_steps": _SAVE,
    "save_total_limit": "use checkpoint.keep_last",
    "save_strategy": "every epoch is saved; use checkpoint.every_n_steps to save within an epoch",
    "eval_steps": _VALIDATE,
    "eval_strategy": "every epoch ends with a validation; use validate_every_n_steps to validate within an epoch",
    "logging_steps": "use log_every_n_steps",
    "report_to": _LOGGER,
    "wandb": _LOGGER,
    "wandb_project": _LOGGER,
    # methods
    "finetuning_type": _LORA,
    "adapter": _LORA,
    "use_peft": _LORA,
    "lora_r": "use model.lora_rank, with method=lora",
    "lora_rank": "use model.lora_rank, with method=lora",
    "lora_alpha": "use model.lora_alpha, with method=lora",
    "lora_dropout": "use model.lora_dropout, with method=lora",
    "lora_target_modules": "use model.lora_attn_modules, with method=lora",
}
"""From a key of TRL, LLaMA-Factory, axolotl or torchtune's older recipes to what to do here."""


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
    hint = "" if len(longer) == 1 else did_you_mean(word, siblings, prefix=prefix)
    if not hint and longer:  # difflib finds no name that is more than twice as long
        hint = f", did you mean {' or '.join(longer[:3])}?"
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


def format_keys(word: str | None = None) -> str:
    """A line for each key of both recipes and of finch's components, or for those whose name or description contains ``word``.

    Raises:
        UserError: no key contains it; names the nearest one.
    """
    sections = {title: shown_keys(model) for title, model in SECTIONS.items()}
    sections["LoRA (finch_lora_finetune)"] = shown_keys(Lora)
    for model in COMPONENTS:
        sections[f"_component_: {model.component}"] = {f"{model.key}.{name}": key for name, key in keys(model).items()}
    known = [name for section in sections.values() for name in section]
    for title, section in sections.items():
        component = title.partition("_component_: ")[2]
        sections[title] = {
            name: key
            for name, key in section.items()
            if (word or "").lower() in f"{name} {key.help} {component}".lower()
        }
    if not any(sections.values()):
        raise UserError(f"no key contains {word}{key_hint(str(word), known) or '; `finch keys` lists them'}")
    width = max(len(name) for section in sections.values() for name in section)
    lines: list[str] = []
    for title, section in sections.items():
        lines += ["", title] if section else []
        for name, key in section.items():
            default = format_default(key)
            note = default if key.default is REQUIRED else f"default: {default}"
            lines.append(f"  {name:<{width}}  {key.help} [{key.expected}; {note}]")
    return "\n".join(lines[1:])


def recipe_help(recipe: str, model: type[Keys]) -> str:
    """What ``--help`` of a recipe prints."""
    sections: dict[str, type[Keys]] = {**SECTIONS, **({"LoRA": Lora} if issubclass(model, Lora) else {})}
    names = "\n".join(
        textwrap.fill(
            " ".join(section.model_fields), 120, initial_indent=f"  {title + ':':<26}", subsequent_indent=" " * 28
        )
        for title, section in sections.items()
    )
    return f"""usage: tune run [TORCHRUN-OPTIONS] {recipe} --config NAME_OR_PATH [key=value ...] [~key] [method=NAME]

  --config NAME_OR_PATH     a YAML file, or the name of a config that comes with finch: `finch configs`
  key=value                 overrides the file; optimizer.lr=1e-5 inside a block
  ~key                      removes a key or block
  method=NAME               trains with a method, or several joined by +: `finch methods`

keys, described by `finch keys`; `finch keys WORD` searches them:
{names}"""
