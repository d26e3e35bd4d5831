"""The keys of the recipes' configs: each with its type, its default and what it does. `finch keys` prints them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

REQUIRED = object()
"""The default of a key that must be given."""

Component = dict
"""A block with a ``_component_``, the dotted path of a class or function, and its arguments."""


@dataclass(frozen=True)
class Option:
    """A config key.

    Attributes:
        type: one type or a union: ``Literal`` for choices, ``Component`` for a block with a ``_component_``, ``Path`` for any
            text, ``| None`` where null is accepted. An int is accepted where float is.
        default: the value if the key is left out, or REQUIRED.
        help: what the key does.
        minimum: the smallest number accepted.
        above: a number must be larger. With a bound, text is read as a number.
        pattern: a regular expression of texts accepted beside the choices.
        unsupported: values that have an error message of their own.
        block: the keys of a block without a ``_component_``; empty: any.
        named_block: the keys of each block of a mapping from names to blocks.
        is_named: whether a mapping from names to components is accepted as well.
    """

    type: Any
    default: Any
    help: str
    minimum: float | None = None
    above: float | None = None
    pattern: str | None = None
    unsupported: Mapping[Any, str] = field(default_factory=dict)
    block: Mapping[str, Option] | None = None
    named_block: Mapping[str, Option] | None = None
    is_named: bool = False

    @property
    def members(self) -> tuple[Any, ...]:
        """The members of the union; a type by itself is its only member."""
        return (self.type,) if get_origin(self.type) is Literal else get_args(self.type) or (self.type,)

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(choice for member in self.members for choice in get_args(member))

    @property
    def is_nullable(self) -> bool:
        return NoneType in self.members

    @property
    def is_component(self) -> bool:
        is_block = self.block is not None or self.named_block is not None
        return Component in self.members and list not in self.members and not is_block

    @property
    def expected(self) -> str:
        """The accepted values for people: ``int >= 1``, ``full, selective or null``."""
        names = [str(choice) for choice in self.choices if type(choice) is not bool]
        bound = (
            f" >= {self.minimum:g}"
            if self.minimum is not None
            else f" > {self.above:g}"
            if self.above is not None
            else ""
        )
        words = {bool: "True, False", int: f"int{bound}", float: f"number{bound}", list: "list", Path: "PATH"}
        for member in self.members:
            if member is bool:
                names = ["True", "False", *names]
            elif member in words:
                names.append(words[member])
            elif member is str and not (self.choices or bound):
                names.append("text")
            elif member is Component:
                names.append("named blocks" if self.named_block else "component" if self.block is None else "block")
        if self.is_named:
            names.append("named components")
        if self.is_nullable:
            names.append("null")
        return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def accepts(self, value: Any) -> bool:
        """Whether a value that is not null has the type and lies in the bounds."""
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        if self.pattern is not None and isinstance(value, str):
            return re.fullmatch(self.pattern, value) is not None
        types = {{Path: str}.get(member, member) for member in self.members}
        if type(value) not in types and not (type(value) is int and float in types):
            return False
        if self.minimum is None and self.above is None:
            return True
        try:
            number = float(value)
        except ValueError:
            return False
        return number > self.above if self.above is not None else number >= (self.minimum or 0)


MODEL_AND_DATA: dict[str, Option] = {
    "model": Option(Component, REQUIRED, "builds the torchtune decoder"),
    "tokenizer": Option(Component, REQUIRED, "builds the tokenizer"),
    "checkpointer": Option(
        Component, REQUIRED, "torchtune's block: checkpoint_dir, checkpoint_files, output_dir, model_type"
    ),
    "dataset": Option(
        Component | list,
        REQUIRED,
        "training rows; the datasets of a list are concatenated, or mixed if each has a weight",
    ),
    "dataset_validation": Option(
        Component | list | None,
        None,
        "held-out rows; their mean loss is computed at the end of each epoch; a mapping from names to components is several sets",
        is_named=True,
    ),
    "collate_fn": Option(str, "torchtune.data.padded_collate_sft", "function that pads a micro-batch"),
    "output_dir": Option(str, REQUIRED, "the run's folder: metrics, checkpoints, Hugging Face folders"),
}

BATCH: dict[str, Option] = {
    "batch_size": Option(int, 1, "samples per forward pass and rank (the micro-batch)", minimum=1),
    "gradient_accumulation_steps": Option(int, 1, "micro-batches per optimizer step", minimum=1),
    "shuffle": Option(bool, True, "a new seeded permutation each epoch"),
    "seed": Option(int | None, 0, "seed of the data order and of all random numbers; null draws one", minimum=0),
    "drop_last": Option(bool, False, "leave out an epoch's last global batch if it is short"),
    "num_workers": Option(int, 0, "processes per rank that read and tokenize ahead", minimum=0),
    "check_dataset": Option(
        bool,
        True,
        "read every row once before weights are loaded, to find broken and overlong ones; init: dataset, FLOW and STM read them anyway",
    ),
}

OPTIMIZATION: dict[str, Option] = {
    "optimizer": Option(Component, REQUIRED, "the optimizer; its lr is eta_base under FinchLR"),
    "lr_scheduler": Option(
        Component | None, None, "finch.FinchLR, a torchtune scheduler, or null for a constant learning rate"
    ),
    "loss": Option(
        Component,
        {"_component_": "torch.nn.CrossEntropyLoss"},
        "one of torchtune's cross-entropy losses, or of finch.objectives",
    ),
    "regularizer": Option(
        Component | None, None, "adds a gradient toward the pretrained weights: finch.regularization.L2; null: none"
    ),
    "kl_penalty": Option(
        Component | None,
        None,
        "adds the KL divergence from the pretrained model's next-token distribution to the objective: finch.regularization.KL; null: none",
    ),
    "clip_grad_norm": Option(
        float | str | None, None, "largest gradient norm; null does not clip; the paper clips to 1.0", above=0
    ),
    "on_nonfinite": Option(
        Literal["raise", "skip"] | None,
        None,
        "if a loss or gradient is not finite: raise an error, or skip the update; null: what lr_scheduler sets, else raise",
    ),
    "optimizer_in_bwd": Option(
        bool,
        False,
        "update each weight inside the backward and free its gradient at once; no accumulation, no clipping",
    ),
    "epochs": Option(int, 1, "passes over the training rows", minimum=1),
    "max_steps_per_epoch": Option(
        int | None, None, "optimizer steps after which an epoch ends; null: all rows", minimum=1
    ),
    "validate_every_n_steps": Option(int | None, None, "also validate after every n optimizer steps", minimum=1),
}

PROBE: dict[str, Option] = {
    "kind": Option(
        Literal["auto", "text", "question_answer", "multiple_choice", "self"],
        "auto",
        "what is measured; auto: by the fields of the rows; self: the pretrained model's own greedy answers to the rows' prompts",
    ),
    "source": Option(str | None, None, "a hub name, or json, csv or parquet; null: by the extension of data_files"),
    "data_files": Option(str | list | None, None, "local path, pattern, or a list of them"),
    "name": Option(str | None, None, "the hub's configuration"),
    "split": Option(str, "train", "the hub's or file's split; train[100:200] is accepted"),
    "format": Option(str, "auto", "format of text, chat and question-answer rows, as in finch.data.rows.rows_dataset"),
    "column_map": Option(Component | None, None, "from the format's fields to the columns", block={}),
    "rows": Option(int, 32, "how many rows of the split are used, from the first", minimum=1),
    "every_n_steps": Option(int | None, None, "null: probes_every_n_steps", minimum=1),
    "task": Option(
        bool, False, "these rows are of the task that is learned: select_by takes them for DFT, TALR and STM"
    ),
    "max_new_tokens": Option(int, 64, "of kind self: longest answer, in tokens", minimum=1),
    "top_k": Option(
        int,
        512,
        "of kind self: most likely tokens of the pretrained model that are kept for the KL; the rest count as one",
        minimum=1,
    ),
}

BUDGET: dict[str, Option] = {
    "probe": Option(str, REQUIRED, "name of the probe"),
    "metric": Option(
        Literal["loss", "kl"], "loss", "loss: its increase since step 0; kl: the KL, of a probe of kind self"
    ),
    "max_increase": Option(float, REQUIRED, "largest value inside the budget, in nats a token", above=0),
    "action": Option(
        Literal["stop", "note"], "note", "stop: the run ends at the first evaluation outside; note: a log line"
    ),
    "save": Option(
        Literal["evaluations", "epochs"],
        "evaluations",
        "when RUN/within_budget is renewed: at each evaluation inside the budget, which exports the model, or at the ends of epochs alone",
    ),
}

FORGETTING: dict[str, Option] = {
    "probes": Option(
        Component | None,
        None,
        "small sets that are evaluated before the first step, during training and at the ends of epochs, by name",
        named_block=PROBE,
    ),
    "probes_every_n_steps": Option(
        int | None,
        None,
        "steps between two evaluations of the probes; null: so many that they take less than 5% of the time, by token counts",
        minimum=1,
    ),
    "forgetting_budget": Option(Component | None, None, "how much one probe may get worse", block=BUDGET),
    "select_by": Option(
        Literal["validation_loss", "validation/NAME/loss", "probe/NAME/loss", "probe/NAME/accuracy", "probe/NAME/kl"]
        | None,
        None,
        "which metric RUN/best is chosen by; null: the first validation loss, for DFT, TALR and STM the probe with task: True",
        pattern=r"validation/[^/]+/loss|probe/[^/]+/(loss|accuracy|kl)",
    ),
}

HARDWARE: dict[str, Option] = {
    "device": Option(
        Literal["auto", "cpu", "cuda", "cuda:N"], "auto", "auto: CUDA where there is a GPU", pattern=r"cuda:\d+"
    ),
    "dtype": Option(
        Literal["fp32", "bf16", "bf16_mixed", "bf16_stochastic", "fp64"],
        "fp32",
        "bf16: pure; bf16_mixed: fp32 master weights; bf16_stochastic: bf16 weights, stochastic rounding",
        unsupported=dict.fromkeys(
            ("fp16", "float16", "half"),
            "is not trained in full: its range needs gradient scaling; use bf16, bf16_mixed or fp32",
        ),
    ),
    "compile": Option(bool, False, "torch.compile layers and loss"),
    "padding_free": Option(
        bool,
        True,
        "run the layers on samples without padding, tokens that all of a micro-batch begin with once; False: pad",
    ),
    "enable_activation_checkpointing": Option(
        bool, False, "recompute each layer in the backward: less memory, more time"
    ),
    "enable_activation_offloading": Option(bool, False, "keep checkpointed activations in host memory (CUDA)"),
    "ac_mode": Option(
        Literal["full", "selective"] | None, None, "torchtune's selective activation checkpointing: which layers"
    ),
    "ac_option": Option(
        Literal["op"] | int | str | None, None, "with ac_mode=selective: op, or n for every n-th layer", minimum=1
    ),
    "custom_sharded_layers": Option(
        list | None, None, "modules besides the layers that FSDP2 wraps on their own, such as tok_embeddings"
    ),
    "cudnn_deterministic_mode": Option(
        Literal["default", "warn", "error", 0, 1, 2] | None, None, "torch's deterministic debug mode"
    ),
}

PARALLELISM: dict[str, Option] = {
    "fsdp_cpu_offload": Option(bool, False, "keep parameters, gradients and optimizer states in host memory"),
    "fsdp_reshard_after_forward": Option(
        bool, True, "free gathered parameters after the forward; False: faster, more memory"
    ),
    "fsdp_reduce_every_micro_batch": Option(
        bool, True, "reduce gradients after each micro-batch; False: once a step, with complete gradients on each rank"
    ),
    "data_parallel_replicate_dim": Option(
        int, 1, "HSDP: copies of the sharded model; gradients are averaged over them", minimum=1
    ),
    "data_parallel_shard_dim": Option(
        Literal[-1] | int, -1, "ranks that one copy is sharded over; -1: all remaining", minimum=1
    ),
    "tensor_parallel_dim": Option(int, 1, "ranks that share each layer's matrix products", minimum=1),
    "tensor_parallel_plan": Option(
        Component | None,
        None,
        "how they share them: torchtune.models.llama3.base_llama_tp_plan, or finch.models.qwen3.qwen3_tp_plan",
    ),
    "debug_checks": Option(bool, False, "compare learning rate and EMA bit for bit over the ranks at each step"),
    "distributed_timeout": Option(float, 1800, "seconds after which a collective that hangs is an error", minimum=1),
}

CHECKPOINT: dict[str, Option] = {
    "every_n_steps": Option(int | None, None, "save a resumable checkpoint after every n optimizer steps", minimum=1),
    "every_n_minutes": Option(
        float | None, None, "save one at the next step once n minutes have passed since the last save", minimum=0
    ),
    "keep_last": Option(int, 1, "complete checkpoints that are kept; 2 leaves one to fall back on", minimum=1),
    "async": Option(bool, True, "write while training continues; costs a copy of the state in host memory"),
}

OUTPUT: dict[str, Option] = {
    "checkpoint": Option(
        Component,
        {key: option.default for key, option in CHECKPOINT.items()},
        "when a resumable checkpoint is saved between epoch ends",
        block=CHECKPOINT,
    ),
    "save_last_epoch_only": Option(
        bool,
        False,
        "write the Hugging Face folder of the last epoch alone, and save no resumable checkpoint at the ends of the epochs before it",
    ),
    "resume_from_checkpoint": Option(
        bool | Literal["auto"] | Path,
        False,
        "continue the run in output_dir: True from its last checkpoint, auto if there is one, or from a step_N folder",
    ),
    "overwrite": Option(
        bool,
        False,
        "start from scratch in an output_dir that holds a run; its files are removed when the first step starts",
    ),
    "metric_logger": Option(Component | None, None, "a torchtune metric logger beside metrics.jsonl"),
    "log_every_n_steps": Option(
        int, 1, "how often the metric logger and the progress bar are updated, and a GPU is read", minimum=1
    ),
    "log_peak_memory_stats": Option(bool, True, "log the peak memory of each step, on CUDA"),
    "log_level": Option(
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        "INFO",
        "of finch's logger",
        pattern="(?i)debug|info|warn|warning|error|fatal|critical|notset",
    ),
    "hooks": Option(
        Component | None,
        None,
        "your own finch.training.hooks.Hook classes by name, called around each step; docs/recipe.md",
        is_named=True,
    ),
    "profiler": Option(Component | None, None, "torchtune's profiler block"),
    "export_dtype": Option(
        Literal["fp32", "bf16", "fp64"] | None, None, "dtype of the Hugging Face folders' weights; null: as trained"
    ),
}

LORA: dict[str, Option] = {
    "save_adapter_weights_only": Option(
        bool, False, "write only the adapter at the end of an epoch, without the merged model"
    ),
}

SECTIONS: dict[str, dict[str, Option]] = {
    "Model and data": MODEL_AND_DATA,
    "Batch": BATCH,
    "Optimization": OPTIMIZATION,
    "Forgetting": FORGETTING,
    "Precision, memory, speed": HARDWARE,
    "Parallelism": PARALLELISM,
    "Output": OUTPUT,
}

FULL_FINETUNE: dict[str, Option] = {key: option for section in SECTIONS.values() for key, option in section.items()}

LORA_FINETUNE: dict[str, Option] = {
    **FULL_FINETUNE,
    "model": Option(
        Component,
        REQUIRED,
        "builds a torchtune decoder with LoRA layers, such as torchtune.models.llama3.lora_llama3_8b",
    ),
    **LORA,
}

RECIPES: dict[str, dict[str, Option]] = {"finch_full_finetune": FULL_FINETUNE, "finch_lora_finetune": LORA_FINETUNE}


@dataclass(frozen=True)
class UnsupportedKey:
    """A key of torchtune's recipes that finch's do not have.

    Attributes:
        no_op_value: the value with which the key does nothing, and is accepted.
        remedy: what is wrong with another value, and what to do.
    """

    no_op_value: Any
    remedy: str


# Keys of torchtune's distributed recipes, 0.6.1's and its main branch's.
UNSUPPORTED_KEYS: dict[str, UnsupportedKey] = {
    "context_parallel_dim": UnsupportedKey(
        1, "there is no context parallelism; set it to 1, and use tensor_parallel_dim"
    ),
    "context_parallel_rotate_method": UnsupportedKey("allgather", "there is no context parallelism; leave it out"),
    "enable_fp8_training": UnsupportedKey(False, "there is no fp8 training; set it to False"),
    "fp8_recipe_name": UnsupportedKey(None, "there is no fp8 training; set it to null"),
    "enable_async_checkpointing": UnsupportedKey(False, "the key here is checkpoint.async; set it to False"),
    "save_every_n_steps": UnsupportedKey(None, "the key here is checkpoint.every_n_steps; set it to null"),
    "batch_size_val": UnsupportedKey(None, "validation uses batch_size; leave it out"),
    "resize_token_embeddings": UnsupportedKey(False, "embeddings keep the checkpoint's size; set it to False"),
    "activation_offloading_use_streams": UnsupportedKey(True, "offloading always uses streams; leave it out"),
}

# Names of torchtune's main branch for keys that finch has.
ALIASES = {"dataset_val": "dataset_validation", "run_val_every_n_steps": "validate_every_n_steps"}
