"""The keys of the recipes' configs, and the arguments of finch's own components: types, choices, ranges, defaults and what each does.

``validation`` checks configs against these models, `finch list keys` prints them, and editors read them as finch.schema.json, which
.ci/pages/json_schema.py writes after a change. The text under a key is its description everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

Json = dict[str, Any]


def _number(value: Any) -> Any:
    """Text such as 1e-5 as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _refuse_fp16(value: Any) -> Any:
    if value in ("fp16", "float16", "half"):
        raise ValueError("is not trained in full: its range needs gradient scaling; use bf16, bf16_mixed or fp32")
    return value


def _require_component(value: dict[str, Any]) -> dict[str, Any]:
    if "_component_" not in value:
        raise ValueError("has no _component_")
    return value


def _require_schedule(value: dict[str, Any]) -> dict[str, Any]:
    return value if set(value) == {"decay"} else _require_component(value)


def _refuse_huge(value: int) -> int:
    if value > 10**12:
        raise ValueError("is more than a run can have; give less")
    return value


Component = Annotated[dict[str, Any], AfterValidator(_require_component), WithJsonSchema({"shown": "component"})]
"""A block with a ``_component_``, the dotted path of a class or function, and its arguments."""

Schedule = Annotated[dict[str, Any], AfterValidator(_require_schedule), WithJsonSchema({"shown": "component"})]
"""A component, or a constant rate that decays."""

Components = Annotated[
    list[Component], WithJsonSchema({"type": "array", "items": {"shown": "component"}, "shown": "list"})
]
NamedComponents = Annotated[dict[str, Any], WithJsonSchema({"shown": "component, named components"})]
"""Also a component; ``validation`` checks which it is."""

# Not le=, which would put the limit into every description of such a key.
PositiveInt = Annotated[int, Field(ge=1), AfterValidator(_refuse_huge)]
PositiveNumber = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NAME = "^[A-Za-z0-9_-]+$"
ROWS = "finch.data.rows.rows_dataset"
Name = Annotated[str, Field(pattern=NAME)]
"""Part of a metric's name and of a file's."""


def _text(shown: str, pattern: str | None = None) -> Any:
    """Text that people read about as ``shown``."""
    return Field(pattern=pattern, json_schema_extra={"shown": shown})


Value = TypeVar("Value")
# What a key of a run's config affects, by its type.
Result = Annotated[Value, "result"]
"""What is learned, or what is measured of it."""
Speed = Annotated[Value, "speed"]
"""Time and memory; of the result the last bits at most."""
Place = Annotated[Value, "place"]
"""Where the run is, what it shows and keeps; no bit of the result."""


class Keys(BaseModel):
    """Keys of a config, others are unknown. Numbers and booleans are not read from text, but for those that say so."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @classmethod
    def of(cls, block: Any) -> Self | None:
        """The values of a config's block; None without it."""
        from omegaconf import OmegaConf

        return None if block is None else cls.model_validate(OmegaConf.to_container(block, resolve=True))


class ModelAndData(Keys):
    model: Result[Component]
    """builds the torchtune decoder"""
    tokenizer: Result[Component]
    """builds the tokenizer"""
    checkpointer: Result[Component]
    """torchtune's block: checkpoint_dir, checkpoint_files, output_dir, model_type"""
    dataset: Result[Component | Components]
    """training rows; the datasets of a list are concatenated, or mixed if each has a weight"""
    dataset_validation: Result[NamedComponents | Components | None] = None
    """held-out rows; their mean loss is computed at the end of each epoch; a mapping from names to components is several sets"""
    collate_fn: Result[str] = "torchtune.data.padded_collate_sft"
    """function that pads a micro-batch"""
    output_dir: Place[str]
    """the run's folder: metrics, checkpoints, Hugging Face folders"""


class Batch(Keys):
    batch_size: Result[PositiveInt] = 1
    """samples per forward pass and rank (the micro-batch)"""
    gradient_accumulation_steps: Result[PositiveInt] = 1
    """micro-batches per optimizer step"""
    shuffle: Result[bool] = True
    """a new seeded permutation each epoch"""
    seed: Result[Annotated[int, Field(ge=0)] | None] = 0
    """seed of the data order and of all random numbers; null draws one"""
    drop_last: Result[bool] = False
    """leave out an epoch's last global batch if it is short"""
    num_workers: Place[Annotated[int, Field(ge=0)]] = 0
    """processes per rank that read and tokenize ahead"""
    check_dataset: Speed[bool] = True
    """read every row once before weights are loaded, to find broken and overlong ones; init: dataset, FLOW and STM read them anyway"""


class SelfReplay(Keys):
    prompts: str = "self"
    """self: the model writes them, user turns by its chat template, or whole texts without one; or a file of prompts"""
    rows: PositiveInt = 128
    """how many answers"""
    max_new_tokens: PositiveInt = 64
    """longest answer, and longest prompt that the model writes, in tokens"""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """replayed rows per row of the task; a step has at least one"""
    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    """factor of the mean KL divergence at the answers' tokens; 0 only measures it"""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """of the answers' sampling, seeded by row; 0: greedy"""
    top_k: PositiveInt = 512
    """most likely tokens of the pretrained model that are kept for the KL; the rest count as one"""
    cache: str | None = None
    """a folder that keeps the answers for other runs on the same model and prompts; null: only the run's folder does"""


class EarlyStopping(Keys):
    patience: PositiveInt = 2
    """readings in a row, at epochs' ends and every validate_every_n_steps, that are no better than the best"""


class Optimization(Keys):
    optimizer: Result[Component]
    """the optimizer; its lr is eta_base under FinchLR"""
    lr_scheduler: Result[Schedule | None] = None
    """finch.FinchLR, a torchtune scheduler, or null for a constant learning rate; each with decay, or that alone"""
    loss: Result[Component] = {"_component_": "torch.nn.CrossEntropyLoss"}
    """one of torchtune's cross-entropy losses, or of finch.objectives"""
    regularizer: Result[Component | None] = None
    """adds a gradient toward the pretrained weights: finch.regularization.L2; null: none"""
    kl_penalty: Result[Component | None] = None
    """adds the KL divergence from the pretrained model's next-token distribution to the objective: finch.regularization.KL; null: none"""
    self_replay: Result[SelfReplay | None] = None
    """replays the pretrained model's own answers: further rows of each step, held to its distributions; null: no"""
    clip_grad_norm: Result[Annotated[PositiveNumber, BeforeValidator(_number)] | None] = None
    """largest gradient norm; null does not clip; the paper clips to 1.0"""
    on_nonfinite: Result[Literal["raise", "skip"] | None] = None
    """if a loss or gradient is not finite: raise an error, or skip the update; null: what lr_scheduler sets, else raise"""
    optimizer_in_bwd: Speed[bool] = False
    """update each weight inside the backward and free its gradient at once; no accumulation, no clipping"""
    epochs: Result[PositiveInt] = 1
    """passes over the training rows"""
    max_steps_per_epoch: Result[PositiveInt | None] = None
    """optimizer steps after which an epoch ends; null: all rows"""
    validate_every_n_steps: Result[PositiveInt | None] = None
    """also validate after every n optimizer steps"""
    early_stopping: Result[EarlyStopping | None] = None
    """end the run once the metric that RUN/best is chosen by, the validation loss, no longer improves; null: no"""


class Probe(Keys):
    kind: Literal["auto", "text", "question_answer", "multiple_choice", "self"] = "auto"
    """what is measured; auto: by the fields of the rows; self: the pretrained model's own greedy answers to the rows' prompts"""
    source: str | None = None
    """a hub name, or json, csv or parquet; null: by the extension of data_files"""
    data_files: str | list[Any] | None = None
    """local path, pattern, or a list of them; null: of kind self finch's own prompts, of twelve skills in turn"""
    name: str | None = None
    """the hub's configuration"""
    split: str = "train"
    """the hub's or file's split; train[100:200] is accepted"""
    format: str = "auto"
    """format of text, chat and question-answer rows, as in finch.data.rows.rows_dataset"""
    column_map: dict[str, Any] | None = None
    """from the format's fields to the columns"""
    rows: PositiveInt | None = None
    """how many rows of the split are used, from the first; null: 32, of finch's own prompts 96"""
    group_by: str | None = None
    """a field of the rows whose values are groups: metrics are by group too, such as kl/code; null: skill, where the rows have it"""
    every_n_steps: PositiveInt | None = None
    """null: probes_every_n_steps"""
    task: bool = False
    """these rows are of the task that is learned: select_by takes them for DFT, TALR and STM"""
    max_new_tokens: PositiveInt = 64
    """of kind self: longest answer, in tokens"""
    top_k: PositiveInt = 512
    """of kind self: most likely tokens of the pretrained model that are kept for the KL; the rest count as one"""


class Budget(Keys):
    probe: str
    """name of the probe"""
    metric: Literal["loss", "kl"] | Annotated[str, _text("kl/GROUP", "^kl/[^/]+$")] = "loss"
    """loss: its increase since step 0; kl: the KL, of a probe of kind self, or of one group of its rows"""
    max_increase: PositiveNumber
    """largest value inside the budget, in nats per token"""
    action: Literal["stop", "note"] = "note"
    """stop: the run ends at the first evaluation outside; note: a log line"""
    save: Literal["evaluations", "epochs"] = "evaluations"
    """when RUN/within_budget is renewed: at each evaluation inside the budget, which exports the model, or only at the ends of epochs"""

    @property
    def key(self) -> str:
        """The metric that must not exceed ``max_increase``. The KL is 0 at step 0: it is its own change."""
        return f"probe/{self.probe}/" + (self.metric if self.metric != "loss" else "loss_change")


class Forgetting(Keys):
    probes: Result[dict[Name, Probe] | None] = None
    """small sets that are evaluated before the first step, during training and at the ends of epochs, by name"""
    probes_every_n_steps: Result[PositiveInt | None] = None
    """steps between two evaluations of the probes; null: so many that they take less than 5% of the time, by token counts"""
    forgetting_budget: Result[Budget | None] = None
    """how much one probe may get worse"""
    select_by: Result[
        Annotated[
            str,
            _text(
                "validation_loss, validation/NAME/loss, probe/NAME/loss, probe/NAME/accuracy, probe/NAME/kl, probe/NAME/kl/GROUP",
                "^(validation_loss|validation/[^/]+/loss|probe/[^/]+/(loss|accuracy|kl)(/[^/]+)?)$",
            ),
        ]
        | None
    ] = None
    """which metric RUN/best is chosen by; null: the first validation loss, for DFT, TALR and STM the probe with task: True"""


class Hardware(Keys):
    device: Place[Literal["auto", "cpu", "cuda"] | Annotated[str, _text("cuda:N", r"^cuda:\d+$")]] = "auto"
    """auto: CUDA where there is a GPU"""
    dtype: Result[
        Annotated[Literal["fp32", "bf16", "bf16_mixed", "bf16_stochastic", "fp64"], BeforeValidator(_refuse_fp16)]
    ] = "fp32"
    """bf16: pure; bf16_mixed: fp32 master weights; bf16_stochastic: bf16 weights, stochastic rounding"""
    float32_matmul_precision: Result[Literal["highest", "high", "medium"]] = "highest"
    """of fp32 products on CUDA; high: TF32, with 10 bits of mantissa for 23"""
    compile: Speed[bool] = False
    """torch.compile layers and loss"""
    padding_free: Speed[bool] = True
    """run the layers on samples without padding, tokens that all of a micro-batch begin with once; False: pad"""
    enable_activation_checkpointing: Speed[bool] = False
    """recompute each layer in the backward: less memory, more time"""
    enable_activation_offloading: Speed[bool] = False
    """keep checkpointed activations in host memory (CUDA)"""
    ac_mode: Speed[Literal["full", "selective"] | None] = None
    """torchtune's selective activation checkpointing: which layers"""
    ac_option: Speed[Annotated[PositiveInt, BeforeValidator(_whole_number)] | None] = None
    """with ac_mode=selective: n for every n-th layer; torchtune names op as well and has not implemented it"""
    custom_sharded_layers: Speed[list[Any] | None] = None
    """modules, besides the layers, that FSDP2 wraps separately, such as tok_embeddings"""
    cudnn_deterministic_mode: Speed[
        Literal["default", "warn", "error"]
        | Annotated[int, Field(ge=0, le=2, json_schema_extra={"shown": "0, 1, 2"})]
        | None
    ] = None
    """torch's deterministic debug mode"""


class Parallelism(Keys):
    fsdp_cpu_offload: Speed[bool] = False
    """keep parameters, gradients and optimizer states in host memory"""
    fsdp_reshard_after_forward: Speed[bool] = True
    """free gathered parameters after the forward; False: faster, more memory"""
    fsdp_layers_per_group: Speed[PositiveInt | None] = None
    """layers whose weights are gathered together; null: as many as 1 GB holds, at most 4. More: less work for the host, more memory"""
    fsdp_reduce_every_micro_batch: Speed[bool] = True
    """reduce gradients after each micro-batch; False: once per step, with complete gradients on each rank"""
    fsdp_reduce_in_fp32: Speed[bool] = False
    """reduce the gradients of bf16 weights in fp32: more exact on many ranks, twice the bytes"""
    data_parallel_replicate_dim: Speed[PositiveInt] = 1
    """HSDP: copies of the sharded model; gradients are averaged over them"""
    data_parallel_shard_dim: Speed[Literal[-1] | PositiveInt] = -1
    """ranks that one copy is sharded over; -1: all remaining"""
    tensor_parallel_dim: Speed[PositiveInt] = 1
    """ranks that share each layer's matrix products"""
    tensor_parallel_plan: Speed[Component | None] = None
    """how they share them: torchtune.models.llama3.base_llama_tp_plan, or finch.models.qwen3.qwen3_tp_plan"""
    debug_checks: Place[bool] = False
    """compare learning rate and EMA bit for bit over the ranks at each step"""
    distributed_timeout: Place[Annotated[float, Field(ge=1)]] = 1800
    """seconds after which a collective that hangs is an error"""


class Checkpoint(Keys):
    every_n_steps: PositiveInt | None = None
    """save a resumable checkpoint after every n optimizer steps"""
    every_n_minutes: Annotated[float, Field(ge=0)] | None = None
    """save one at the next step once n minutes have passed since the last save"""
    keep_last: PositiveInt = 1
    """complete checkpoints that are kept; 2 leaves one to fall back on"""
    is_async: bool = Field(True, alias="async")
    """write while training continues; costs a copy of the state in host memory, page-locked where there is a GPU"""


class Output(Keys):
    checkpoint: Place[Checkpoint] = Checkpoint.model_validate({})
    """when a resumable checkpoint is saved between epoch ends"""
    average: Result[Literal["auto"] | None] = None
    """auto: at the end of the run, the average with the pretrained model at the knee of learning and forgetting, as finch average"""
    save_last_epoch_only: Place[bool] = False
    """write only the last epoch's Hugging Face folder, and save no resumable checkpoint at the ends of the epochs before it"""
    save_best_only: Place[bool] = False
    """keep one Hugging Face folder, the best epoch's, or the last one's where none is chosen, and save no resumable checkpoint at epochs' ends"""
    resume_from_checkpoint: Place[bool | Literal["auto"] | Annotated[str, _text("PATH")]] = False
    """continue the run in output_dir: True from its last checkpoint, auto if there is one, or from a step_N folder"""
    overwrite: Place[bool] = False
    """start from scratch in an output_dir that holds a run; its files are removed when the first step starts"""
    metric_logger: Place[Component | None] = None
    """wandb, tensorboard, trackio, csv, or another torchtune metric logger, next to metrics.jsonl"""
    log_every_n_steps: Place[PositiveInt] = 1
    """how often the metric logger and the progress bar are updated, and a GPU is read"""
    log_peak_memory_stats: Place[bool] = True
    """log the peak memory since the last logged step, on CUDA"""
    log_level: Place[
        Annotated[
            Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "WARN", "FATAL", "NOTSET"],
            BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
            WithJsonSchema(
                {"anyOf": [{"enum": ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]}, {"pattern": "^[A-Za-z]+$"}]}
            ),
        ]
    ] = "INFO"
    """of finch's logger"""
    hooks: Result[NamedComponents | None] = None
    """your own finch.training.hooks.Hook classes by name, called around each step; docs/recipe.md"""
    profiler: Place[Component | None] = None
    """torchtune's profiler block"""
    export_dtype: Result[Literal["fp32", "bf16", "fp64"] | None] = None
    """dtype of the Hugging Face folders' weights; null: as trained"""


class Lora(Keys):
    save_adapter_weights_only: Result[bool] = False
    """write only the adapter at the end of an epoch, without the merged model"""


SECTIONS: dict[str, type[Keys]] = {
    "Model and data": ModelAndData,
    "Batch": Batch,
    "Optimization": Optimization,
    "Forgetting": Forgetting,
    "Precision, memory, speed": Hardware,
    "Parallelism": Parallelism,
    "Output": Output,
}


class FullFinetuneKeys(Output, Parallelism, Hardware, Forgetting, Optimization, Batch, ModelAndData):
    """The keys of finch_full_finetune."""


class LoraFinetuneKeys(Lora, FullFinetuneKeys):
    """The keys of finch_lora_finetune."""

    model: Result[Component]
    """builds a torchtune decoder with LoRA layers, such as torchtune.models.llama3.lora_llama3_8b"""


RECIPES: dict[str, type[Keys]] = {"finch_full_finetune": FullFinetuneKeys, "finch_lora_finetune": LoraFinetuneKeys}


class Arguments(Keys):
    """The arguments of one of finch's components that a config gives.

    Attributes:
        component: its dotted path; other paths to the same object are accepted as well.
        key: where a config has it.
    """

    component: ClassVar[str]
    key: ClassVar[str]

    @classmethod
    def paths(cls) -> str:
        """A pattern of the dotted paths to it."""
        return rf"^finch\.(\w+\.)*{cls.component.rpartition('.')[2]}$"


class AnySchedule(Arguments):
    decay: Fraction = 0.0
    """the last share of the steps, which goes linearly to 0"""


class FinchLR(AnySchedule):
    component, key = "finch.FinchLR", "lr_scheduler"

    eta_max: PositiveNumber | Literal["auto"] = 5e-5
    """largest learning rate; 5e-5 in the paper; auto: 2.5 x eta_base"""
    init: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["dataset", "first_batch"] = "dataset"
    """where the EMA starts, in nats; dataset: the pretrained model's mean loss over the training rows; first_batch: the first loss"""
    eta_base: PositiveNumber | None = None
    """learning rate at a loss of 1 nat; null: optimizer.lr"""
    ema: Fraction = 0.9
    """weight of the past in the moving average of the loss"""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """added to the loss under the root, in nats"""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """of these first updates the i-th takes i / warmup_steps of the rate; 0 in the paper"""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """if a loss is not finite: raise an error, or skip the update; the recipe's key on_nonfinite overrides it"""
    max_nonfinite: PositiveInt = 10
    """how many non-finite losses in a row end the run under skip"""


class ReplayLR(AnySchedule):
    component, key = "finch.ReplayLR", "lr_scheduler"

    log: str
    """the earlier run whose learning rates are replayed: its folder or metrics.jsonl"""
    shape: Literal["curve", "linear", "mean"] = "curve"
    """curve: as logged; linear: the straight line between the log's ends; mean: their mean"""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """as finch.FinchLR has it"""
    max_nonfinite: PositiveInt = 10
    """as finch.FinchLR has it"""


class CosineWithWarmup(AnySchedule):
    component, key = "finch.cosine.cosine_with_warmup", "lr_scheduler"

    warmup_fraction: Fraction = 0.05
    """share of the steps with a linear warm-up"""
    num_cycles: float = 0.5
    """periods of the cosine; 0.5 ends at 0"""
    warmup_from_zero: bool = False
    """whether step i of the n of the warm-up takes (i - 1) / n of the rate, as in torchtune, and the first one changes nothing; else i / n"""


class FLOW(Arguments):
    component, key = "finch.objectives.FLOW", "loss"

    tau: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """in nats; null: the median of the pretrained model's sequence losses over the training rows"""


class TALR(Arguments):
    component, key = "finch.objectives.TALR", "loss"

    tau: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["auto", "exact", "lagged"] = "auto"
    """a constant in nats (FINCH's paper), or the median sequence loss of this step (exact; Lin et al.) or of the one before (lagged); auto: exact where a step has one micro-batch"""
    w_min: Annotated[float, Field(ge=0, le=1)] = 0.01
    """least weight of a token"""


class STM(Arguments):
    component, key = "finch.objectives.STM", "loss"

    threshold: Annotated[float, Field(gt=1)] = 2.5
    """largest perplexity under the pretrained model of a token that is trained on; 2.5 in the paper"""


class L2(Arguments):
    component, key = "finch.regularization.L2", "regularizer"

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    """factor of the penalty; 0 only measures the distance"""
    form: Literal["sum", "half", "mean"] = "sum"
    """of the squares of the differences: their sum, half of it, or their mean"""
    offload: bool = False
    """keep the pretrained weights in host memory"""


class KL(Arguments):
    component, key = "finch.regularization.KL", "kl_penalty"

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """factor of the penalty; 0.1 by ASFT's authors; 0 only measures the divergence"""
    reference: Literal["online", "cached"] = "online"
    """online: the pretrained model runs next to the trained one, exactly; cached: its top_k likeliest tokens are computed once"""
    top_k: PositiveInt | None = None
    """tokens of a cached distribution; null: 64"""


class Dataset(Arguments):
    """Each of finch's datasets has some of them; the defaults are rows_dataset's."""

    component, key = ROWS, "dataset"

    @classmethod
    def paths(cls) -> str:
        return r"^finch\.data\.\w+\.\w+_dataset$"

    source: str | None = None
    """a hub name, or json, csv or parquet; null: by the extension of data_files"""
    data_files: str | list[Any] | None = None
    """local path, pattern, or a list of them"""
    name: str | None = None
    """the hub's configuration"""
    split: str | None = "train"
    """the hub's or file's split; train[:400] is accepted"""
    format: str = "auto"
    """auto, or one of docs/data.md's formats by name"""
    column_map: dict[str, Any] | None = None
    """from the format's fields to columns of other names"""
    part: Literal["all", "train", "validation", "test"] = "all"
    """which rows; rows_dataset has test with split_by=content"""
    validation_fraction: Fraction = 0.1
    """share of the rows in the part validation"""
    test_fraction: Fraction = 0.0
    """share of the rows in the part test"""
    split_seed: int = 0
    """of the permutation or hash that chooses the rows of a part"""
    split_by: Literal["order", "content"] = "order"
    """order: a permutation of the row numbers; content: the same rows whatever their order in the file, equal prompts together"""
    questions: str | list[Any] | None = None
    """sciknoweval_solutions_dataset: local rows of SciKnowEval, in place of source"""
    domain: str | None = None
    """sciknoweval_dataset: of the rows; null: any"""
    level: str | None = None
    """sciknoweval_dataset: of the rows; null: any"""
    train_on_input: bool = False
    """whether all turns are targets, not only the assistant's"""
    new_system_prompt: str | None = None
    """a system turn before each row; it replaces the row's system turn"""
    packed: bool = False
    """whether rows are packed to tokenizer.max_seq_len"""


class LoraBuilder(Arguments):
    """A builder of a model with LoRA layers, torchtune's or finch's; it has other arguments as well."""

    model_config = ConfigDict(extra="allow")
    component, key = "lora_...", "model"

    @classmethod
    def paths(cls) -> str:
        return r"\.lora_\w+$"

    lora_attn_modules: Annotated[
        list[Any], WithJsonSchema({"type": "array", "items": {"enum": ["q_proj", "k_proj", "v_proj", "output_proj"]}})
    ]
    """the attention's layers with adapters; all four with method=lora"""
    apply_lora_to_mlp: bool = False
    """whether the feed-forward layers have adapters; True with method=lora"""
    apply_lora_to_output: bool = False
    """whether the output layer has one; not where it is the embedding"""
    lora_rank: PositiveInt = 8
    """columns of B, rows of A; 64 with method=lora"""
    lora_alpha: PositiveNumber = 16
    """B A is multiplied by lora_alpha / lora_rank; 64 with method=lora"""
    lora_dropout: Fraction = 0.0
    """share of A's inputs set to 0 in training"""
    use_dora: bool = False
    """train each row's norm separately (DoRA)"""


COMPONENTS: tuple[type[Arguments], ...] = (
    *(LoraBuilder, FinchLR, ReplayLR, CosineWithWarmup),
    *(FLOW, TALR, STM, L2, KL, Dataset),
)


def arguments_of(path: str) -> type[Arguments] | None:
    """The arguments of a component, by a dotted path to it; None of one that is not described here."""
    return next((model for model in COMPONENTS if re.search(model.paths(), path)), None)


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


def affecting(what: str) -> frozenset[str]:
    """The keys of a run's config that affect ``result``, ``speed`` or ``place``; a block as a whole."""
    fields = LoraFinetuneKeys.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if what in field.metadata)


REQUIRED = object()
"""The default of a key that must be given."""


@dataclass(frozen=True)
class Key:
    """What a model says of one key.

    Attributes:
        expected: the accepted values for people: ``int >= 1``, ``full, selective or null``.
        default: REQUIRED if the key must be given.
        block: the names in a block without a component.
        is_named: whether it is a mapping from names to such blocks.
    """

    expected: str
    default: Any
    help: str
    block: tuple[str, ...] = ()
    is_named: bool = False

    @property
    def is_component(self) -> bool:
        return self.expected in ("component", "component or null")


@functools.cache
def keys(model: type[Keys]) -> dict[str, Key]:
    """Each key of a model by its dotted path, such as ``checkpoint.every_n_steps`` and ``probes.NAME.rows``; a block before its keys."""
    schema = model.model_json_schema()
    return dict(_keys(schema, schema.get("$defs", {})))


def _keys(schema: Json, definitions: Json) -> Iterator[tuple[str, Key]]:
    for name, node in schema["properties"].items():
        members = [_resolved(member, definitions) for member in node.get("anyOf", [node])]
        blocks = [*members, *(_resolved(value, definitions) for each in members for value in _named(each))]
        block = next((each for each in blocks if "properties" in each), None)
        words = [word for member in members for word in _words(member)]
        expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        default = REQUIRED if name in schema.get("required", ()) else node.get("default")
        is_named = any(_named(each) for each in members)
        yield name, Key(expected, default, node["description"], tuple(block["properties"] if block else ()), is_named)
        if block is not None:
            prefix = f"{name}.NAME" if is_named else name
            yield from ((f"{prefix}.{inner}", key) for inner, key in _keys(block, definitions))


def _resolved(node: Json, definitions: Json) -> Json:
    return definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _named(node: Json) -> list[Json]:
    """The blocks of a mapping from names to blocks."""
    return list(node.get("patternProperties", {}).values())


def _words(node: Json) -> list[str]:
    """The values that one member of a JSON schema accepts, for people."""
    if "shown" in node:
        return node["shown"].split(", ")
    if "const" in node or "enum" in node:
        return [str(value) for value in node.get("enum", [node.get("const")])]
    if node.get("type") == "object":
        return ["named blocks" if _named(node) else "block"]
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = " and".join(f" {sign} {node[name]:g}" for name, sign in signs.items() if name in node)
    words = {
        "boolean": ["True", "False"],
        "integer": [f"int{bounds}"],
        "number": [f"number{bounds}"],
        "string": ["text"],
    }
    return {**words, "array": ["list"], "null": ["null"]}.get(node.get("type", ""), [])
