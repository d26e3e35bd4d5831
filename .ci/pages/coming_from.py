"""The pages "Coming from TRL, axolotl, LLaMA-Factory, torchtune": each trainer's keys, and what finch says to use for them.

What to use is `finch.config.key_search.OTHER_NAMES`, which the recipes answer an unknown key with. Which keys a trainer has is read from the
installed package; axolotl and LLaMA-Factory are not installed, and their names stand here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from finch.config.key_search import OTHER_NAMES
from finch.config.schema import ALIASES, UNSUPPORTED_KEYS, LoraFinetuneKeys, keys

_OTHER_VALUES = {
    "dataset": "a block with `data_files`, or `data_files=FILE` with `auto`; there it is a name",
    "device": "`auto`, `cpu`, `cuda` or `cuda:N`",
    "dtype": "`fp32`, `bf16`, `bf16_mixed` or `bf16_stochastic`",
    "lr_scheduler": "`method=sft` for cosine, `method=finch`, or a block",
    "optimizer": "a class, such as `optimizer=torch.optim.AdamW`; there it is a short name",
    "batch_size": "samples per forward pass and rank",
}
"""Keys that finch and another trainer have under one name, but with other values."""

_AUTO = {"use checkpointer.checkpoint_dir and model": "; with `auto` only `model_dir`"}

# axolotl's src/axolotl/utils/schemas and LLaMA-Factory's src/llamafactory/hparams, July and August 2026, and transformers' TrainingArguments.
_AXOLOTL = """activation_checkpointing adam_beta1 adam_beta2 adam_epsilon adapter attn_implementation base_model bf16
dataloader_num_workers deepspeed eval_steps eval_strategy flash_attention fp16 fsdp gradient_checkpointing learning_rate load_in_4bit
load_in_8bit logging_steps lora_alpha lora_dropout lora_r lora_target_modules lr max_grad_norm max_steps micro_batch_size num_epochs
sample_packing save_steps save_strategy save_total_limit sequence_len torch_compile train_on_inputs val_set_size wandb_project
warmup_ratio warmup_steps
batch_size device gradient_accumulation_steps lr_scheduler optimizer output_dir resume_from_checkpoint seed"""
_LLAMA_FACTORY = """adam_beta1 adam_beta2 adam_epsilon bf16 cutoff_len dataloader_num_workers deepspeed eval_dataset eval_steps
eval_strategy finetuning_type flash_attn fp16 fsdp gradient_checkpointing learning_rate logging_steps lora_alpha lora_dropout lora_rank
lr_scheduler_type max_grad_norm max_steps model_name_or_path num_train_epochs optim overwrite_output_dir packing
per_device_eval_batch_size per_device_train_batch_size report_to save_steps save_strategy save_total_limit torch_compile val_size
warmup_ratio warmup_steps
dataset gradient_accumulation_steps log_level output_dir resume_from_checkpoint seed"""
_EARLIER_TRL = "max_seq_length overwrite_output_dir torch_dtype warmup_ratio"
"""Keys of earlier versions."""


@dataclass
class Trainer:
    """One page.

    Attributes:
        names: the trainer's keys.
        theirs: a short config of it, whose keys are all on the page.
        ours: the same as a command of finch.
        notes: what a table does not say.
    """

    title: str
    names: set[str]
    theirs: str
    ours: str
    notes: list[str] = field(default_factory=list)


def trainers() -> dict[str, Trainer]:
    trl = fields("transformers", "training_args.py") | fields("trl", "trainer/sft_config.py", "trainer/base_config.py")
    trl |= fields("trl", "trainer/model_config.py", "scripts/utils.py")
    callback = "To keep {} and add only FINCH's schedule, see [FINCH in your own code](../integrate.md#{})."
    return {
        "trl": Trainer(
            "TRL",
            trl | set(_EARLIER_TRL.split()),
            "model_name_or_path: Qwen/Qwen3-4B\nnum_train_epochs: 3\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n"
            "learning_rate: 2.0e-5\ngradient_checkpointing: true\nmax_length: 2048\nbf16: true\noutput_dir: out/sft\n",
            "model_dir=Qwen3-4B data_files=rows.jsonl epochs=3 batch_size=4 gradient_accumulation_steps=4 optimizer.lr=2e-5 "
            "enable_activation_checkpointing=True tokenizer.max_seq_len=2048 dtype=bf16 output_dir=out/sft",
            [
                callback.format("`SFTTrainer`", "trls-sfttrainer"),
                "Rows with `messages`, or with `prompt` and `completion`, are read as they are.",
                "With `messages` all assistant turns are targets, and nothing else (`assistant_only_loss=True` in TRL).",
            ],
        ),
        "axolotl": Trainer(
            "axolotl",
            set(_AXOLOTL.split()),
            "base_model: Qwen/Qwen3-4B\nsequence_len: 2048\nsample_packing: true\nval_set_size: 0.05\noutput_dir: out/sft\n"
            "micro_batch_size: 4\ngradient_accumulation_steps: 4\nnum_epochs: 3\nlearning_rate: 2.0e-5\nbf16: true\n",
            "model_dir=Qwen3-4B data_files=rows.jsonl tokenizer.max_seq_len=2048 dataset.packed=True dataset.validation_fraction=0.05 "
            "output_dir=out/sft batch_size=4 gradient_accumulation_steps=4 epochs=3 optimizer.lr=2e-5 dtype=bf16",
            [
                callback.format("axolotl", "llama-factory-and-axolotl"),
                "`datasets: - path: FILE, type: alpaca` is `data_files=FILE`: the format is recognised from the fields of the rows.",
            ],
        ),
        "llama-factory": Trainer(
            "LLaMA-Factory",
            set(_LLAMA_FACTORY.split()),
            "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\ndataset: my_rows\ncutoff_len: 2048\nval_size: 0.05\n"
            "output_dir: out/sft\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\nnum_train_epochs: 3\n"
            "learning_rate: 2.0e-5\nbf16: true\n",
            "model_dir=Qwen3-4B data_files=rows.jsonl tokenizer.max_seq_len=2048 dataset.validation_fraction=0.05 "
            "output_dir=out/sft batch_size=4 gradient_accumulation_steps=4 epochs=3 optimizer.lr=2e-5 dtype=bf16",
            [
                callback.format("LLaMA-Factory", "llama-factory-and-axolotl"),
                "There is no `dataset_info.json`: `data_files` names the file, and the format (alpaca, sharegpt and others) is recognised "
                "from the fields of the rows.",
                "There is no `template`: the chat template is the model folder's own.",
            ],
        ),
    }


def fields(package: str, *files: str) -> set[str]:
    """The annotated names of the classes in files of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the page about {package} needs it: pip install -e '.[dev]'")
    names: set[str] = set()
    for file in files:
        path = Path(spec.origin).parent / file
        classes = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        ]
        names |= {
            x.target.id
            for each in classes
            for x in each.body
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
        }
    return names


def pages() -> dict[str, str]:
    return {
        **{f"coming-from/{name}.md": page(trainer) for name, trainer in trainers().items()},
        "coming-from/torchtune.md": torchtune_page(),
    }


def page(trainer: Trainer) -> str:
    known = set(LoraFinetuneKeys.model_fields)
    translated = {name: remedy for name, remedy in OTHER_NAMES.items() if name in trainer.names}
    same = sorted((known & trainer.names) - set(_OTHER_VALUES))
    other_values = sorted(known & trainer.names & set(_OTHER_VALUES))
    if missing := set(yaml.safe_load(trainer.theirs)) - translated.keys() - set(same) - set(other_values):
        raise RuntimeError(f"{trainer.title}: the example's {missing} are not on the page")
    rows = [f"| `{name}` | {marked(remedy)}{_AUTO.get(remedy, '')} |" for name, remedy in translated.items()]
    rows += [f"| `{name}` | {_OTHER_VALUES[name]} |" for name in other_values]
    return f"""# Coming from {trainer.title}

This is in {trainer.title}:

```yaml
{trainer.theirs}```

and this in finch, where `model_dir` is a Hugging Face folder on this machine (`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B`):

```bash
{wrapped(f"finch run auto {trainer.ours}")}
```

`finch check` with the same arguments checks the run without training. What is not given is chosen by looking at the model and the rows, and printed.

{chr(10).join(f"- {note}" for note in trainer.notes)}
- All formats of rows: [Data](../data.md).

## Keys

A key of {trainer.title} on finch's command line ends in an error that names finch's key, by the same table:

```text
{unknown_key("learning_rate", "1e-05")}
```

| {trainer.title} | finch |
|---|---|
{chr(10).join(rows)}

The same in both: {", ".join(f"`{name}`" for name in same)}. A key that is not here has no translation; `finch list keys WORD` searches finch's.
"""


def torchtune_page() -> str:
    refused = "\n".join(
        f"| `{name}` | `{'null' if key.no_op_value is None else key.no_op_value}` | {marked(key.remedy)} |"
        for name, key in UNSUPPORTED_KEYS.items()
    )
    aliases = "\n".join(f"| `{alias}` | `{name}` |" for alias, name in ALIASES.items())
    theirs = torchtune_names()
    ours = ", ".join(f"`{name}`" for name in LoraFinetuneKeys.model_fields if name not in theirs)
    return f"""# Coming from torchtune

finch's recipes read torchtune's configs. The text configs of full fine-tuning that torchtune ships pass unchanged
([which](../compatibility.md)):

```bash
tune cp llama3_1/8B_full my.yaml
finch run --nproc_per_node 8 my.yaml                 # as it is: torchtune's schedule
finch run --nproc_per_node 8 my.yaml method=finch    # FINCH
```

`tune run finch_full_finetune` and `tune run finch_lora_finetune` start the same recipes. To keep a recipe of your own, see
[the lines that FINCH needs in a copy](../integrate.md#a-copy-of-a-torchtune-recipe).

## Other names

Names of torchtune's main branch that are read as well:

| torchtune | finch |
|---|---|
{aliases}

## Refused keys

With the value in the second column they do nothing, and are accepted.

| key | accepted | otherwise |
|---|---|---|
{refused}

## Keys that torchtune does not have

{ours}. `finch list keys` describes them.
"""


def torchtune_names() -> set[str]:
    """The keys of the configs of torchtune's full and LoRA fine-tuning."""
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parents[1] / "recipes" / "configs").glob("**/*.yaml")
    return {
        name
        for file in files
        if re.search("full|lora", file.name)
        for name in re.findall(r"^(\w+):", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def unknown_key(name: str, value: str) -> str:
    return f"finch: error: unknown key {name}={value}; {OTHER_NAMES[name]}"


def marked(text: str) -> str:
    """``text`` with keys of finch and assignments as code."""
    names = {name for name in keys(LoraFinetuneKeys)} | {"--nproc_per_node N"}
    words = (
        r"\b[\w.]+=[\w.]+\b|--nproc_per_node N|\b[a-z]\w*(?:[._]\w+)+\b|\b(?:"
        + "|".join(sorted(n for n in names if n.isalpha()))
        + r")\b"
    )
    prose = {"compile", "model", "optimizer", "loss", "device", "average", "hooks", "profiler", "shuffle"}
    text = re.sub(words, lambda m: m[0] if m[0] in prose and not text.startswith(f"use {m[0]}") else f"`{m[0]}`", text)
    return text.removeprefix("use ")


def wrapped(command: str, width: int = 76) -> str:
    lines = [""]
    for word in command.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
