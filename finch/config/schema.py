"""Every top-level key of a recipe's config, with its default and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED = object()


@dataclass(frozen=True)
class Option:
    """A key: its default (REQUIRED: none), the types it takes, and what it does. ``block``: the keys of a block that is
    no component."""

    default: Any
    kinds: tuple[type, ...]
    help: str
    minimum: float | None = None
    nullable: bool = False
    block: Mapping[str, Option] | None = None


@dataclass(frozen=True)
class UnsupportedKey:
    """A key of torchtune's recipes that finch's do not have: the value that asks for nothing, and what to do instead."""

    harmless: Any
    instead: str


# Keys of torchtune's distributed recipes, 0.6.1's and its main branch's. Their harmless values pass, so that a config that
# merely names them runs.
UNSUPPORTED_KEYS: dict[str, UnsupportedKey] = {
    "context_parallel_dim": UnsupportedKey(
        1, "sequences are not cut over ranks here; set it to 1, and use tensor_parallel_dim"
    ),
    "context_parallel_rotate_method": UnsupportedKey("allgather", "there is no context parallelism here; leave it out"),
    "enable_fp8_training": UnsupportedKey(False, "linear layers are not trained in fp8 here; set it to False"),
    "fp8_recipe_name": UnsupportedKey(None, "linear layers are not trained in fp8 here; set it to null"),
    "enable_async_checkpointing": UnsupportedKey(False, "checkpoint.async says it here; set it to False"),
    "save_every_n_steps": UnsupportedKey(None, "checkpoint.every_n_steps says it here; set it to null"),
    "batch_size_val": UnsupportedKey(None, "validation uses batch_size; leave it out"),
    "resize_token_embeddings": UnsupportedKey(False, "embeddings keep the checkpoint's size; set it to False"),
    "activation_offloading_use_streams": UnsupportedKey(True, "offloading always uses streams; leave it out"),
}

# The same keys under the names of torchtune's main branch.
ALIASES = {"dataset_val": "dataset_validation", "run_val_every_n_steps": "validate_every_n_steps"}

COMPONENT = (dict,)
NUMBER = (int, float)

CHECKPOINT: dict[str, Option] = {
    "every_n_steps": Option(None, (int,), "save the state to resume from after every n optimizer steps", 1),
    "every_n_minutes": Option(
        None, NUMBER, "save it at the next step once n minutes have passed since the last save", 0
    ),
    "keep_last": Option(1, (int,), "whole checkpoints that stay; 2 leaves one to fall back on", 1),
    "async": Option(True, (bool,), "write while training goes on; costs a copy of the state in host memory"),
}

FULL_FINETUNE: dict[str, Option] = {
    # What is trained on what
    "model": Option(REQUIRED, COMPONENT, "component that builds the torchtune decoder"),
    "tokenizer": Option(REQUIRED, COMPONENT, "component that builds the tokenizer"),
    "checkpointer": Option(
        REQUIRED, COMPONENT, "torchtune's block: checkpoint_dir, checkpoint_files, output_dir, model_type"
    ),
    "dataset": Option(REQUIRED, (dict, list), "component of the training rows, or a list of them, concatenated"),
    "dataset_validation": Option(
        None, (dict, list), "component of held-out rows; their mean loss is taken at each epoch's end"
    ),
    "collate_fn": Option("torchtune.data.padded_collate_sft", (str,), "function that pads a micro-batch"),
    "output_dir": Option(REQUIRED, (str,), "the run's folder: metrics, checkpoints, Hugging Face folders"),
    # The batch
    "batch_size": Option(1, (int,), "samples a forward pass and rank (the micro-batch)", 1),
    "gradient_accumulation_steps": Option(1, (int,), "micro-batches an optimizer step", 1),
    "shuffle": Option(True, (bool,), "a new seeded permutation each epoch"),
    "seed": Option(0, (int,), "of the data order and of everything random; null draws one", 0, nullable=True),
    "drop_last": Option(False, (bool,), "leave out an epoch's last global batch if it is short"),
    "num_workers": Option(0, (int,), "processes a rank that read and tokenize ahead", 0),
    "check_dataset": Option(
        True,
        (bool,),
        "read every row once before weights are loaded, to find broken and overlong ones; init: dataset, FLOW and STM read them anyway",
    ),
    # The update
    "optimizer": Option(REQUIRED, COMPONENT, "component of the optimizer; its lr is eta_base under FinchLR"),
    "lr_scheduler": Option(
        None, COMPONENT, "finch.FinchLR, a torchtune scheduler, or null for a constant learning rate"
    ),
    "loss": Option(
        {"_component_": "torch.nn.CrossEntropyLoss"},
        COMPONENT,
        "torchtune's cross-entropy losses, all plain cross-entropy here",
    ),
    "regularizer": Option(
        None,
        COMPONENT,
        "component that pulls weights toward the pretrained ones, finch.regularization.L2; null: none",
    ),
    "clip_grad_norm": Option(
        None, (int, float, str), "largest gradient norm; null does not clip; the paper clips to 1.0"
    ),
    "on_nonfinite": Option(
        None,
        (str,),
        "a loss or gradient that is not finite: raise, skip the update, or rollback to the last checkpoint and on past the batch; null: as lr_scheduler says, else raise",
    ),
    "optimizer_in_bwd": Option(
        False,
        (bool,),
        "update each weight inside the backward and free its gradient at once; no accumulation, no clipping",
    ),
    # How long
    "epochs": Option(1, (int,), "passes over the training rows", 1),
    "max_steps_per_epoch": Option(None, (int,), "optimizer steps after which an epoch ends; null: all of it", 1),
    "validate_every_n_steps": Option(None, (int,), "also validate after every n optimizer steps", 1),
    # Numbers, memory, speed
    "device": Option("auto", (str,), "cuda, cpu, or auto: CUDA where there is one"),
    "dtype": Option("fp32", (str,), "fp32, bf16 (pure), bf16_mixed (fp32 master weights), bf16_stochastic, fp64"),
    "compile": Option(False, (bool,), "torch.compile layers and loss"),
    "enable_activation_checkpointing": Option(
        False, (bool,), "recompute each layer in the backward: less memory, more time"
    ),
    "enable_activation_offloading": Option(False, (bool,), "keep checkpointed activations in host memory (CUDA)"),
    "ac_mode": Option(None, (str,), "selective activation checkpointing: full or selective"),
    "ac_option": Option(None, (int, str), "with ac_mode selective: every n-th layer, or op"),
    "fsdp_cpu_offload": Option(False, (bool,), "keep parameters, gradients and optimizer states in host memory"),
    "fsdp_reshard_after_forward": Option(
        True, (bool,), "free gathered parameters after the forward; False: faster, more memory"
    ),
    "data_parallel_replicate_dim": Option(
        1, (int,), "HSDP: copies of the sharded model; gradients are averaged over them", 1
    ),
    "data_parallel_shard_dim": Option(-1, (int,), "ranks a copy is sharded over; -1: all that are left", -1),
    "tensor_parallel_dim": Option(1, (int,), "ranks that share each layer's matrix products", 1),
    "tensor_parallel_plan": Option(
        None,
        COMPONENT,
        "how: torchtune.models.llama3.base_llama_tp_plan, or finch.models.qwen3.qwen3_tp_plan",
    ),
    "custom_sharded_layers": Option(
        None, (list,), "modules besides the layers that FSDP2 wraps on their own, such as tok_embeddings"
    ),
    "cudnn_deterministic_mode": Option(None, (int, str), "torch's deterministic debug mode: default, warn or error"),
    "debug_checks": Option(False, (bool,), "compare learning rate and EMA bit for bit over the ranks at each step"),
    "distributed_timeout": Option(1800, NUMBER, "seconds after which a collective that hangs is an error", 1),
    # Where it is written
    "checkpoint": Option(
        {key: option.default for key, option in CHECKPOINT.items()},
        (dict,),
        "when a state to resume from is saved between epoch ends",
        block=CHECKPOINT,
    ),
    "resume_from_checkpoint": Option(
        False,
        (bool, str),
        "continue the run in output_dir: True from its last checkpoint, auto if there is one, or the path of a step_N folder",
    ),
    "overwrite": Option(False, (bool,), "start afresh in an output_dir that holds a run; its files are removed first"),
    "metric_logger": Option(None, COMPONENT, "a torchtune metric logger beside metrics.jsonl"),
    "log_every_n_steps": Option(
        1, (int,), "how often the metric logger and the progress bar are fed, and a GPU is read", 1
    ),
    "log_peak_memory_stats": Option(True, (bool,), "peak memory a step, on CUDA"),
    "log_level": Option("INFO", (str,), "of torchtune's logger"),
    "profiler": Option(None, COMPONENT, "torchtune's profiler block"),
    "export_dtype": Option(None, (str,), "dtype of the Hugging Face folders' weights: fp32, bf16; null: as trained"),
}

LORA_FINETUNE: dict[str, Option] = {
    **FULL_FINETUNE,
    "model": Option(
        REQUIRED, COMPONENT, "component that builds a torchtune decoder with LoRA layers, such as lora_llama3_8b"
    ),
    "save_adapter_weights_only": Option(
        False, (bool,), "write the adapter alone at an epoch's end, without the merged model"
    ),
}

RECIPES: dict[str, dict[str, Option]] = {"finch_full_finetune": FULL_FINETUNE, "finch_lora_finetune": LORA_FINETUNE}
