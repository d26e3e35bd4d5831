"""``auto``: fills in the keys that a config file leaves out, by looking at the model's folder, the rows and the device."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from finch.base import hub
from finch.base.errors import UserError
from finch.base.run_files import CONFIG
from finch.cli.early_checks import device_of
from finch.config.instantiate import build, component_of
from finch.config.methods import METHODS
from finch.config.parser import SHORT_LIMIT, merge
from finch.config.schema import ROWS, SelfReplay
from finch.data.row_files import local_files, source_of
from finch.models.families import model_block
from finch.models.hf_config import check_folder

if TYPE_CHECKING:
    from finch.data.formats import RowFormat

MAX_TOKENS = 2048
"""Longest row, where the model's context is longer."""

VALIDATION_FRACTION = 0.1
MAX_VALIDATION_ROWS = 1000
MIN_ROWS_TO_SPLIT = 10

GLOBAL_BATCH = 16
"""Samples per optimizer step: the smaller of the paper's two (Appendix B.2)."""

LR, LR_STEPS = 2e-5, 60
"""The paper's eta_base; steps behind the rates of smaller models."""
_RATES = ((4e9, LR), (135e6, 4e-5), (0.29e6, 5e-4))
"""Of models by their parameters: the paper's; where paraphrases of TOFU are learned best in 60 steps (studies/smollm2_tofu, 2.5e-5 to 5e-5); half of what
learns them there."""

PATIENCE = 2
"""Validations without a better loss after which a run ends."""

_NUM_PROMPTS, _MIN_CONTEXT = 24, 256

_BYTES_PER_ANSWER, _MIN_ANSWERS = 480, 16
"""Of rows, read in all epochs, by which training takes twice as long as one own answer with its prompt, where that was measured: 135 M, two CPU cores."""

_MICRO_BATCH = 4
_BF16_MIXED_BYTES = 16
"""Of fp32 weights and gradients, and AdamW's two fp32 moments, per parameter."""
_SHARE_FOR_STATE = 0.7
"""Of a GPU's memory; the rest is for activations and logits."""

_BLOCKS = ("model", "tokenizer", "dataset")
_SCHEDULE = {"_component_": "finch.FinchLR", "eta_max": "auto", "ema": 0.9, "init": "dataset"}
"""Without self_replay: 2.5 x eta_base is the paper's ratio of its cap, which itself would hold a larger rate constant."""
_BATCH_KEYS = (
    "batch_size",
    "gradient_accumulation_steps",
    "enable_activation_checkpointing",
    "fsdp_reshard_after_forward",
)
_OF_ROWS = ("data_files", "source", "name", "split")
"""Which rows a data set has."""
_OF_SPLIT = ("validation_fraction", "test_fraction", "split_seed", "split_by")
_NUM_MEASURED = 256

Blocks = dict[str, Any]


def complete(
    file_blocks: Blocks, overrides: list[str], *, is_first_look: bool = False, ranks: int | None = None
) -> tuple[Blocks, list[str]]:
    """Adds what a config file leaves out: model, tokenizer, dataset, dataset_validation, batch, dtype, learning rate, output_dir, a probe of own answers, early stopping,
    the schedule, and where no method is named preserve's self_replay, average and constant rate.

    It runs before the command line is merged, so that each key of these blocks can be overridden there. A block is left out
    if the command line names another component for it.

    Args:
        file_blocks: the file's top-level keys. A key that has a value stays as it is.
        overrides: the command line's ``key=value``.
        is_first_look: for mistakes in what is typed: leaves open what depends on weights, rows and device, and imports no torch.
        ranks: on all nodes; None: those that torchrun has started.

    Returns:
        The complete file, and lines that say what was chosen.

    Raises:
        UserError: model_dir or data_files is missing or cannot be used.
    """
    given = _user_values(file_blocks, overrides)
    chosen: Blocks = {}
    messages = []
    folder = check_folder(
        _required(given, "model_dir", "DIR, the model's folder in Hugging Face's format"), "model_dir"
    )
    if _is_open(given, "model"):
        chosen["model"] = model_block(folder)
        context = chosen["model"]["max_seq_len"]
    else:
        context = OmegaConf.select(given, "model.max_seq_len") or MAX_TOKENS
    if _is_open(given, "tokenizer"):
        chosen["tokenizer"] = {
            "_component_": "finch.models.auto_tokenizer",
            "path": "${model_dir}",
            "max_seq_len": min(context, MAX_TOKENS),
        }
    chosen["output_dir"] = f"out/auto/{_slug(hub.name_of(folder))}-{_slug(_rows_name(given))}"
    chosen["lr_scheduler"] = _SCHEDULE
    if is_first_look:
        data = _data(given, overrides, reads_rows=False)[0] if _is_open(given, "dataset") else {}
        return _fill_in(file_blocks, {**chosen, **data, "batch_size": 1}), []
    from finch.distributed.parallel import launched_ranks
    from finch.probes.kinds import NUM_SKILL_ROWS

    ranks = ranks or launched_ranks()
    num_parameters = _num_parameters(folder)
    messages.append(
        f"model_dir={hub.origin(folder) or folder}: {num_parameters / 1e6:,.1f} M parameters, "
        f"{component_of(chosen.get('model')) or component_of(given.model)}, context {context:,} tokens"
    )
    num_rows, num_bytes = None, 0
    if _is_open(given, "dataset"):
        data, num_rows, num_bytes, message = _data(given, overrides, reads_rows=True)
        chosen.update(data)
        messages.append(message)
    before = _run_before(given, chosen["output_dir"])  # a run that goes on keeps what was chosen for it
    data_ranks = max(1, ranks // (_number(given, "tensor_parallel_dim") or 1))  # the others see the same rows
    rows_a_rank = max(1, min(GLOBAL_BATCH, num_rows or GLOBAL_BATCH) // data_ranks)
    memory = _gpu_memory(given)
    device = _device_keys(given, num_parameters, rows_a_rank, ranks, memory)
    chosen.update(device)
    if before is not None:
        chosen["dtype"] = before.get("dtype", device["dtype"])  # on other GPUs, or another number of them, as well
    if "probes" not in file_blocks and context >= _MIN_CONTEXT:
        # What is forgotten, on the model's own answers to finch's prompts: on a CPU generation takes too long for all of them.
        number = _NUM_PROMPTS if device["dtype"] == "fp32" else NUM_SKILL_ROWS
        chosen["probes"] = {"own": {"kind": "self", "rows": number}}
        if not _is_removed("probes", overrides):
            messages.append(f"probes.own: {number} own answers, evaluated as it trains; ~probes removes it")
    limit = _number(given, "tokenizer.max_seq_len")
    is_method_open = _leaves_method_open(given, file_blocks, overrides)
    if before is not None and "self_replay" not in file_blocks:
        chosen |= {key: before[key] for key in ("self_replay", "average") if before.get(key) is not None}
        chosen["lr_scheduler"] = before.get("lr_scheduler")
    elif is_method_open and (longest := min(context, limit or context)) < _MIN_CONTEXT:
        messages.append(
            f"no self_replay, which needs rows of {_MIN_CONTEXT} tokens, not {longest}: FINCH's learning rate"
        )
    elif is_method_open:
        preserve = METHODS["preserve"].blocks
        chosen["self_replay"] = _replay(given, preserve["self_replay"], num_rows, num_bytes)
        if not _is_removed("self_replay", overrides):
            chosen["average"] = preserve["average"]
            number, most = (block["self_replay"]["rows"] for block in (chosen, preserve))
            size = "few" if num_bytes else "of unknown size"
            shown = "" if number == most else f", not {most:,}: the rows are {size}"
            # FINCH's settings on the command line ask for FINCH.
            is_finch = bool(given.get("lr_scheduler") and {*given.lr_scheduler} - {"decay"})
            if not is_finch:
                chosen["lr_scheduler"] = preserve["lr_scheduler"]
            shown += f", and {'the' if is_finch else 'a constant'} learning rate{' of lr_scheduler' * is_finch}"
            messages.append(
                f"self_replay: {number} own answers before the first step, at most about half of the training's time{shown}; method=finch trains without"
            )
    is_validated = chosen.get("dataset_validation") or given.get("dataset_validation")
    is_validated = is_validated and not _is_removed("dataset_validation", overrides)
    if is_validated and "early_stopping" not in file_blocks and not given.get("save_last_epoch_only"):
        chosen["early_stopping"] = {"patience": PATIENCE}
    blocks = _fill_in(file_blocks, chosen)
    if given.get("source") is None:
        blocks.pop("source", None)  # nothing refers to it
    if "optimizer" in blocks and OmegaConf.select(given, "optimizer.lr") is None:
        in_step = device["batch_size"] * device["gradient_accumulation_steps"] * data_ranks
        steps = None if num_rows is None else math.ceil(num_rows / in_step) * _epochs(given)
        rate = learning_rate(num_parameters, steps) if before is None else before["optimizer"]["lr"]
        blocks["optimizer"] = {**blocks["optimizer"], "lr": rate}
        messages.append(
            f"optimizer.lr={rate:g}, for {num_parameters / 1e6:,.1f} M parameters{'' if steps is None else f' and about {steps:,} steps'}; "
            "double it if the validation loss still gains (docs/choose.md)"
        )
    is_batch_open = all(given.get(key) is None for key in _BATCH_KEYS)
    if is_batch_open and memory and device["dtype"] != "fp32":
        batch, message = _fitting_batch(blocks, overrides, rows_a_rank, ranks, memory)
        blocks.update(batch)
        messages.append(message)
    keys = ("dtype", "batch_size", "gradient_accumulation_steps", "output_dir")
    messages.append(" ".join(f"{key}={blocks[key] if given.get(key) is None else given[key]}" for key in keys))
    return blocks, messages


def _fill_in(file_blocks: Blocks, chosen: Blocks) -> Blocks:
    """Both; a file's block that names no component is laid over the chosen one."""
    blocks = {**chosen, **{key: value for key, value in file_blocks.items() if value is not None or key not in chosen}}
    for key, block in chosen.items():
        own = blocks[key]
        if isinstance(block, dict) and "_component_" in block and isinstance(own, dict) and "_component_" not in own:
            blocks[key] = {**block, **own}
    return blocks


def learning_rate(num_parameters: int, num_steps: int | None) -> float:
    """eta_base: ``_RATES``, between them interpolated in logarithms. In five times the steps 0.29 M parameters want a fifth of it. Rounded to
    one digit."""
    number, rate = min(max(num_parameters, _RATES[-1][0]), _RATES[0][0]), LR
    for (larger, low), (smaller, high) in pairwise(_RATES):
        if number >= smaller:
            rate = low * (high / low) ** (math.log(larger / number) / math.log(larger / smaller))
            break
    return float(f"{max(LR, rate * min(1.0, LR_STEPS / (num_steps or 1))):.0e}")


def _run_before(given: DictConfig, folder: str) -> Blocks | None:
    """The config of the run that this one resumes, if there is one."""
    path = Path(given.get("output_dir") or folder, CONFIG)
    is_resumed = given.get("resume_from_checkpoint") not in (None, False)
    found: Any = OmegaConf.to_container(OmegaConf.load(path)) if is_resumed and path.is_file() else None
    return found


def _leaves_method_open(given: DictConfig, file_blocks: Blocks, overrides: list[str]) -> bool:
    """Whether nothing speaks against ``method=preserve``'s keys: neither a method, by name or by its blocks, nor packs."""
    names_method = any(re.match(r"(method|loss|kl_penalty|regularizer)\b", override) for override in overrides)
    is_packed = any(isinstance(each, DictConfig) and each.get("packed") for each in _data_sets(given))
    return not (names_method or given.get("method") or is_packed or "self_replay" in file_blocks)


def _epochs(given: DictConfig) -> int:
    return _number(given, "epochs") or 1


def _number(given: DictConfig, key: str) -> int | None:
    value = OmegaConf.select(given, key)
    return value if isinstance(value, int) and value > 0 else None  # a wrong one is named when all keys are checked


def _replay(given: DictConfig, block: Blocks, num_rows: int | None, size: int) -> Blocks:
    """``block`` with as many own answers as take half of the training's time, by the rows' bytes (0: unknown), and each replayed about once."""
    default, read = SelfReplay(), _epochs(given) * (num_rows or 0)  # the default where sizes are not known
    number = min(block["rows"], _epochs(given) * size // _BYTES_PER_ANSWER) if size else default.rows
    number = max(_MIN_ANSWERS, number)
    share = min(block["share"], number / read) if read else default.share
    return {**block, "rows": number, "share": round(max(default.share, share), 2)}


def _user_values(file_blocks: Blocks, overrides: list[str]) -> DictConfig:
    """What the user has set in the file and on the command line, without interpolations and removals, which only the complete config can resolve."""
    short = rf"^({'|'.join(_BLOCKS)})="  # as `model=finch.models.auto`
    assignments = [
        SHORT_LIMIT.sub("tokenizer.max_seq_len=", re.sub(short, r"\1._component_=", override))
        for override in overrides
        if "=" in override and not override.startswith("~")
    ]
    given = OmegaConf.merge(
        {key: value for key, value in file_blocks.items() if not isinstance(value, dict)},
        OmegaConf.from_dotlist(assignments),
    )
    assert isinstance(given, DictConfig)
    for key, value in file_blocks.items():
        if isinstance(value, dict) and not isinstance(given.get(key), str):
            given[key] = OmegaConf.merge(value, given.get(key) or {})
    return given


def _is_removed(block: str, overrides: list[str]) -> bool:
    return not {f"~{block}", f"{block}=null"}.isdisjoint(overrides)


def _is_open(given: DictConfig, block: str) -> bool:
    """Whether neither the file nor the command line names a component for it, or a list of them."""
    return component_of(given.get(block)) is None and not isinstance(given.get(block), ListConfig)


def _required(given: DictConfig, key: str, meaning: str) -> str:
    if key not in given or OmegaConf.is_missing(given, key) or given[key] is None:
        near = get_close_matches(key, [str(name) for name in given if name != key], n=1)
        raise UserError(
            f"{key} is not set: " + (f"{near[0]}={given[near[0]]} is no key; " if near else "") + f"add {key}={meaning}"
        )
    return str(given[key])


def _num_parameters(folder: Path) -> int:
    from finch.weights.files import stored_tensors
    from finch.weights.huggingface import HuggingFaceFolder

    files = HuggingFaceFolder(str(folder)).files
    return sum(math.prod(each.shape) for file in files for each in stored_tensors(file))


def _device_keys(given: DictConfig, num_parameters: int, rows: int, ranks: int, memory: int | None) -> Blocks:
    """Batch for ``rows`` rows per rank and step, dtype and activation checkpointing; bf16_mixed on GPUs with room for fp32 weights, gradients and moments, else bf16."""
    import torch

    micro_batch, accumulation = (_number(given, key) for key in _BATCH_KEYS[:2])
    micro_batch = micro_batch or max(1, min(_MICRO_BATCH, rows) if accumulation is None else rows // accumulation)
    accumulation = accumulation or max(1, rows // micro_batch)
    keys: Blocks = {"batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    if memory is None or not torch.cuda.is_bf16_supported(including_emulation=False):
        return {**keys, "dtype": "fp32", "enable_activation_checkpointing": False}
    memory *= max(1, ranks // (_number(given, "data_parallel_replicate_dim") or 1))
    is_roomy = num_parameters * _BF16_MIXED_BYTES <= _SHARE_FOR_STATE * memory
    return {**keys, "dtype": "bf16_mixed" if is_roomy else "bf16", "enable_activation_checkpointing": True}


def _gpu_memory(given: DictConfig) -> int | None:
    """In bytes, without the context that local_device makes on the GPU; None: a CPU trains."""
    import torch

    if device_of(given).type != "cuda":
        return None
    index = int(str(given.get("device")).partition(":")[2] or os.environ.get("LOCAL_RANK", "0"))
    index %= torch.cuda.device_count()  # the run refuses one that is not there
    return int(torch.cuda.get_device_properties(index).total_memory)


def _fitting_batch(blocks: Blocks, overrides: list[str], rows: int, ranks: int, memory: int) -> tuple[Blocks, str]:
    """The batch keys for a GPU, the fastest of those that fit, and a line about them."""
    from finch.plan.auto.trial import Trial

    candidates = []  # all rows of a step at once; four at once with their activations computed twice; one at once
    for micro_batch, is_recomputed in ((rows, False), (min(_MICRO_BATCH, rows), True), (1, True)):
        values = (micro_batch, max(1, rows // micro_batch), is_recomputed, is_recomputed)
        candidates.append(dict(zip(_BATCH_KEYS, values, strict=True)))
    rest = {key: value for key, value in blocks.items() if key not in _BATCH_KEYS}
    if "optimizer" in rest:
        # A step's memory does not depend on the rate, nor does the answer that is kept.
        rest["optimizer"] = {**rest["optimizer"], "lr": LR}
    return Trial(rest, overrides, ranks, memory, _long_row(merge(blocks, overrides)[0])).choose(candidates)


def _long_row(cfg: DictConfig) -> tuple[int, int]:
    """Tokens and target tokens of a long row: nine of ten of the first ones are no longer. Of rows that are not in local files half the longest."""
    limit = cfg.tokenizer.get("max_seq_len") or MAX_TOKENS
    if component_of(cfg.dataset) != ROWS or cfg.get("data_files") is None:
        return limit // 2, limit // 4
    rows = build(cfg.dataset, "dataset", build(cfg.tokenizer, "tokenizer"))
    from finch.objectives import IGNORE_INDEX

    samples = [rows[index] for index in range(min(len(rows), _NUM_MEASURED))]
    lengths = sorted(len(sample["tokens"]) for sample in samples)
    num_targets = sum(label != IGNORE_INDEX for sample in samples for label in sample["labels"])
    tokens = lengths[9 * len(lengths) // 10]
    return tokens, max(1, min(tokens - 1, round(num_targets / sum(lengths) * tokens)))


def _data(given: DictConfig, overrides: list[str], *, reads_rows: bool) -> tuple[Blocks, int | None, int, str]:
    """The blocks dataset and dataset_validation; how many rows are left to train on (None: unknown), and the bytes of all; a line about them."""
    source = _source_of(given)
    named = "${source}" if given.get("source") else None
    block: Blocks = {"_component_": ROWS}
    num_rows, size = None, 0
    its: Blocks = given.get("dataset") or {}
    if given.get("data_files") is None and source is not None:
        block |= {"source": named or str(source)}
        message = f"dataset.source={source}: rows of the hub, the format is found when they are read"
    else:
        names = _file_names(given)
        column_map: Any = its.get("column_map")
        column_map = None if column_map is None else OmegaConf.to_container(column_map)
        source = source or source_of(local_files(names))
        block |= {"source": named or source, "data_files": "${data_files}"}
        message = f"data_files={', '.join(names)}"
        if reads_rows:
            from finch.data import formats
            from finch.data.table import read_table

            rows = formats.detect(names, source, column_map)
            block["format"], num_rows, size = rows.format, rows.num_rows, _size_of(local_files(names), rows)
            if its.get("split"):
                num_rows = len(read_table(local_files(names), source, str(its["split"])))
            message += f": {num_rows:,} rows of {rows.label}"
            if rows.unused_columns:
                message += f" (not used: {', '.join(rows.unused_columns)})"
    keys = [*block, *(key for key in its if key not in block)]  # the command line's reach both parts
    if _is_removed("dataset_validation", overrides) or _validates_others(given):
        return (
            {"dataset": block, "dataset_validation": _others(given, keys)},
            num_rows,
            size,
            f"{message}, none held out",
        )
    fraction = its.get("validation_fraction")
    if fraction is None and num_rows is not None and num_rows < MIN_ROWS_TO_SPLIT:
        none: Blocks = {"dataset": block, "dataset_validation": None}
        return none, num_rows, size, f"{message}, too few to hold out some for validation"
    if not isinstance(fraction, float):  # a wrong one is named when all keys are checked
        fraction = VALIDATION_FRACTION if num_rows is None else min(VALIDATION_FRACTION, MAX_VALIDATION_ROWS / num_rows)
        fraction = float(f"{fraction:.3g}")
    left, share = None, f"{fraction:.0%}"
    if num_rows is not None:
        held_out = max(1, round(fraction * num_rows))
        left, share = num_rows - held_out, f"{held_out:,}"
    split = {"validation_fraction": fraction, "split_seed": 0}
    validation = _references(dict.fromkeys([*keys, *split]))
    blocks = {
        "dataset": {**block, "part": "train", **split},
        "dataset_validation": {**validation, "part": "validation"},
    }
    return blocks, left, size, f"{message}, {share} held out for validation"


def _size_of(files: Iterable[Path], rows: RowFormat) -> int:
    """Bytes of what training reads of the rows, as JSON, up to where all of preserve's answers are worth their time: the same rows have the same
    size in any file."""
    from finch.data.row_files import read_rows

    size = 0
    for file in files:
        for row in read_rows(file, str(rows.source)):
            fields = {field: row.get(column) for field, column in rows.columns.items()}
            size += len(json.dumps(fields, ensure_ascii=False, default=str).encode()) + 1  # a line of JSON Lines
            if size >= _BYTES_PER_ANSWER * METHODS["preserve"].blocks["self_replay"]["rows"]:
                return size
    return size


def _references(keys: Iterable[str]) -> Blocks:
    """A block of rows that are read as the training rows are."""
    left_out = ("_component_", "part")
    return {"_component_": ROWS, **{key: f"${{dataset.{key}}}" for key in keys if key not in left_out}}


def _validates_others(given: DictConfig) -> bool:
    """Whether the user names the rows to validate on: none of the training rows are held out then."""
    own = given.get("dataset_validation")
    if not isinstance(own, DictConfig):
        return own is not None  # torchtune's short form of a component
    blocks = [own, *filter(OmegaConf.is_dict, (own._get_node(name) for name in own))]  # one, or several by name
    return any(map(component_of, blocks)) or not {*own}.isdisjoint(_OF_ROWS)


def _others(given: DictConfig, keys: Iterable[str]) -> Blocks | None:
    """The block of other rows than the training rows, for what the user leaves open of it; None: it is complete, or removed."""
    own = given.get("dataset_validation")
    if not isinstance(own, DictConfig) or {*own}.isdisjoint(_OF_ROWS) or component_of(own) is not None:
        return None
    # Other files may be of another kind; another split is of the same.
    replaced = {*_OF_ROWS, "format"} if {"data_files", "source"} & {*own} else {*own}
    return _references(key for key in keys if key not in {*replaced, *_OF_SPLIT})


def _file_names(given: DictConfig) -> list[str]:
    if isinstance(given.get("data_files"), ListConfig):
        return [str(name) for name in given.data_files]
    return [_required(given, "data_files", "ROWS.jsonl, or dataset.source=ORG/NAME for a data set of the hub")]


def _rows_name(given: DictConfig) -> str:
    """What a run on these rows is named after."""
    if given.get("data_files") is not None:
        return Path(_file_names(given)[0]).name.split(".")[0]
    first = next(iter(_data_sets(given)), None)
    return str(_source_of(given) or component_of(first)).rpartition("/")[2]


def _source_of(given: DictConfig) -> Any:
    """The reader of the files, or the hub's name, if the user gives one."""
    return _rows_key(given, "source") or given.get("source")


def _data_sets(given: DictConfig) -> list[Any]:
    """The blocks of a list of data sets, or the only one."""
    rows = given.get("dataset")
    return list(rows) if isinstance(rows, ListConfig) else [rows]


def _rows_key(given: DictConfig, key: str) -> Any:
    """A key of the block dataset; None of a list of data sets, each with its own."""
    rows = given.get("dataset")
    return rows.get(key) if isinstance(rows, DictConfig) else None


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name) or "run"
