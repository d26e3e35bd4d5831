"""The methods by name: ``method=talr``, in a config file or on the command line, makes any config train with TALR.

A method sets the blocks ``lr_scheduler``, ``loss``, ``regularizer``, ``kl_penalty`` and ``self_replay``. A block that it does not name is SFT's:
cosine, plain cross-entropy, and no penalty or replay. Names joined by ``+`` combine: ``method=finch+talr`` is FINCH's schedule with TALR's
token weights.
A method overrides the config file, and the rest of the command line overrides the method:

    file  <  method  <  key=value

A block of the file that has the method's component already keeps its settings, but for those of self_replay that preserve names. A single key
adds no penalty and no replay to a method without it. The key ``method`` itself is not kept: a run's config.yaml holds the blocks.

`finch list methods` works at once and without the torchtune extra: omegaconf is imported only where a method is applied.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import component_of, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

Blocks = dict[str, Any]
"""Top-level keys of a config, as read from YAML."""

SMALL_LR_FACTOR = 0.1
"""small_lr's learning rate / the config's: in place of the paper's rule, which needs a sweep."""

LORA_LR = 2.0e-4
"""The start of the paper's grid for LoRA (Appendix B.2); a rate of full fine-tuning is too small for adapters."""

SFT: Blocks = {
    "lr_scheduler": {"_component_": "finch.cosine.cosine_with_warmup", "warmup_fraction": 0.05},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "regularizer": None,
    "kl_penalty": None,
    "self_replay": None,
}

FINCH: Blocks = {"lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 5.0e-5, "ema": 0.9, "init": "dataset"}}

_PLAIN_CROSS_ENTROPY = ("CrossEntropyLoss", "CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")

KL_PENALTY: Blocks = {"kl_penalty": {"_component_": "finch.regularization.KL", "strength": 0.1, "reference": "online"}}
"""Strength of ASFT's authors, for both methods that have it."""

LORA_RECIPE = "finch_lora_finetune"

LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 64,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
}
"""The settings of FLOW's code: the paper's text names neither rank, alpha nor layers."""


Resolve = Callable[["DictConfig", str, bool], None]
"""Takes file, method and command line merged, which it changes in place; the value of ``method=``; whether ``optimizer.lr`` is overridden."""


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        summary: what it does, for `finch list methods`.
        blocks: the blocks it sets in place of SFT's.
        resolve: sets, after the merge, what depends on the rest of the config.
    """

    summary: str
    blocks: Blocks = field(default_factory=dict)
    resolve: Resolve | None = None


def _scale_lr(cfg: DictConfig, name: str, has_lr_override: bool) -> None:
    from omegaconf import OmegaConf

    if has_lr_override:
        return
    rate = OmegaConf.select(cfg, "optimizer.lr")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise UserError(f"optimizer.lr={rate} must be a number above 0: method={name} takes a tenth of it")
    cfg.optimizer.lr = float(f"{SMALL_LR_FACTOR * rate:.12g}")  # 0.1 * 3e-4 as 3e-05, not 3.0000000000000004e-05


def _add_adapters(cfg: DictConfig, name: str, has_lr_override: bool) -> None:
    """Replaces the model's builder by its LoRA counterpart, also one given on the command line; sets LoRA's learning rate."""
    if not has_lr_override and component_of(cfg.get("optimizer")) is not None:
        cfg.optimizer.lr = LORA_LR
    model = cfg.get("model")
    path = component_of(model)
    if path is None:
        return  # validation reports it
    if isinstance(model, str):
        model = cfg.model = {"_component_": path}
    module, _, builder = path.rpartition(".")
    if not builder.startswith(("lora_", "qlora_")):
        cfg.model["_component_"] = f"{module}.lora_{builder}"
    for key, value in LORA.items():
        if key not in cfg.model:
            cfg.model[key] = value


METHODS: dict[str, Method] = {
    "sft": Method("plain fine-tuning: cross-entropy, 5% linear warm-up, cosine to 0", SFT),
    "small_lr": Method(
        "sft at a tenth of the config's optimizer.lr, unless optimizer.lr is given: in place of the paper's rule",
        resolve=_scale_lr,
    ),
    "finch": Method(
        "a learning rate that follows the loss: min(eta_base / sqrt(EMA of the loss), eta_max), eta_base = optimizer.lr",
        FINCH,
    ),
    "preserve": Method(
        "a constant rate with self_replay of 1,024 answers, and average=auto at the end: at 135 M, without the average, 0.10 of cosine SFT's KL at equal training loss on TOFU, 0.08 on equations",
        {"lr_scheduler": None, "self_replay": {"rows": 1024, "share": 1.0, "strength": 1.0}, "average": "auto"},
    ),
    "flow": Method(
        "sequences with a low loss under the pretrained model weigh more",
        {"loss": {"_component_": "finch.objectives.FLOW"}},
    ),
    "dft": Method("each token's loss is scaled by its probability", {"loss": {"_component_": "finch.objectives.DFT"}}),
    "talr": Method(
        "dft with a sharpness that follows the loss of the batch, as Lin et al. have it (FINCH's paper: loss.tau=NUMBER), and a minimum weight",
        {"loss": {"_component_": "finch.objectives.TALR"}},
    ),
    "stm": Method(
        "trains only on tokens with a low loss under the pretrained model",
        {"loss": {"_component_": "finch.objectives.STM"}},
    ),
    "eaft": Method(
        "tokens with a high entropy under the model weigh more", {"loss": {"_component_": "finch.objectives.EAFT"}}
    ),
    "l2": Method(
        "sft with an L2 penalty on the distance from the pretrained weights",
        {"regularizer": {"_component_": "finch.regularization.L2", "strength": 1.0e-3}},
    ),
    "kl": Method("sft with a penalty of 0.1 x the token KL from the pretrained model", KL_PENALTY),
    "asft": Method(
        "anchored SFT: dft with kl's penalty", {"loss": {"_component_": "finch.objectives.DFT"}, **KL_PENALTY}
    ),
    "self_replay": Method(
        "sft that also replays the pretrained model's own answers, held to its distributions", {"self_replay": {}}
    ),
    "lora": Method(
        "sft of low-rank adapters on all linear layers, rank 64, optimizer.lr=2e-4 unless it is given; finch run takes the recipe finch_lora_finetune",
        {"model": LORA},
        _add_adapters,
    ),
    "wise_ft": Method("sft; afterwards `finch average --tuned` averages the pretrained and the tuned weights"),
    "lr_replay": Method(
        "sft with the learning rates of an earlier run, lr_scheduler.log=RUN",
        {"lr_scheduler": {"_component_": "finch.ReplayLR"}},
    ),
}
FOR_COMPARISONS = METHODS.keys() - {"sft", "finch", "preserve", "kl", "self_replay", "lora"}
"""Those whose use is to repeat what a paper compares, which `finch list` has apart."""


def split_name(name: str) -> list[str]:
    """The methods in a name such as ``finch+talr``.

    Raises:
        UserError: an unknown or repeated method, or two that set the same block.
    """
    names = name.split("+")
    for one in names:
        if one not in METHODS:
            suggestion = did_you_mean(one, METHODS)
            raise UserError(
                f"method={name} is not known{suggestion or '; known are ' + ', '.join(METHODS) + ', joined by +'}"
            )
    owner: dict[str, str] = {}
    for one in names:
        if names.count(one) > 1:
            raise UserError(f"method={name} names {one} more than once; name it once")
        for block in METHODS[one].blocks:
            if block in owner:
                raise UserError(f"method={name}: {owner[block]} and {one} both set {block}; name one of them")
            owner[block] = one
    if {"small_lr", "lr_replay"} <= set(names):
        raise UserError(f"method={name}: lr_replay takes its rates from a log; name one of them")
    return names


def apply_method(file_blocks: Blocks, overrides: list[str]) -> tuple[Blocks, list[str], list[str]]:
    """Replaces the file's blocks by the method's.

    Args:
        file_blocks: the file's top-level keys; not changed.
        overrides: the command line's; its ``method`` overrides the file's, ``method=null`` and ``~method`` remove it.

    Returns:
        The file's keys with the method's blocks; the other overrides; the methods' names, empty without a method.

    Raises:
        UserError: see ``split_name``; a key of a penalty or of self_replay that the method does not have.
    """
    blocks = copy.deepcopy(file_blocks)
    name, from_file = blocks.pop("method", None), True
    remaining = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("method", "~method"):
            name, from_file = None if value in ("", "null", "None") else value, False
        else:
            remaining.append(override)
    if name is None:
        return blocks, remaining, []
    names = split_name(str(name))
    # sft first: a block that no other method sets is SFT's.
    for one in ("sft", *names):
        for key, block in METHODS[one].blocks.items():
            if key != "model":  # LoRA's: resolved later, since the command line may name the builder
                blocks[key] = _keep_settings(block, file_blocks.get(key), from_file=from_file)
    _refuse_switched_on(blocks, remaining, names)
    for key in SFT if from_file else ():  # one text that says both
        said, used = (component_of(each.get(key)) or bool(each.get(key)) for each in (file_blocks, blocks))
        if said and said != used and not _is_plain(said, used):
            what = f"takes {used} in its place" if used else "leaves it out"
            raise UserError(f"{key}: method={name} in the same file {what}; take one of them out")
    optimizer = file_blocks.get("optimizer")
    if from_file and "lora" in names and isinstance(optimizer, dict) and "lr" in optimizer:
        remaining.insert(0, f"optimizer.lr={optimizer['lr']}")  # given, next to the method
    # LORA_LR is above the cap of full fine-tuning: the rate would be that cap throughout.
    if "finch" in names and "lora" in names:
        blocks["lr_scheduler"]["eta_max"] = "auto"
    return blocks, remaining, names


def _refuse_switched_on(blocks: Blocks, overrides: list[str], names: list[str]) -> None:
    """One key of a block that the method leaves out would make the whole block, with its defaults: sft that replays."""
    keys = {override.removeprefix("+").partition("=")[0]: override for override in overrides}
    for key, override in keys.items():
        block = key.partition(".")[0]
        if SFT.get(block, ...) is None and blocks[block] is None and block not in keys:
            named = f"give method={'+'.join([*names, block]).removeprefix('sft+')}, or " if block in METHODS else ""
            raise UserError(f"{override}: method={'+'.join(names)} has no {block}; {named}leave it out")


def resolve(names: list[str], cfg: DictConfig, overrides: list[str]) -> None:
    """Sets, in place, what depends on the merged config ``cfg``.

    Raises:
        UserError: a value it depends on is missing or not a number.
    """
    has_lr_override = any(override.startswith("optimizer.lr=") for override in overrides)
    # In one order, so that a+b and b+a are the same run: LoRA has a rate of its own, of which small_lr takes a tenth.
    for name in sorted(METHODS, key=lambda name: name != "lora"):
        if name in names and (change := METHODS[name].resolve) is not None:
            change(cfg, "+".join(names), has_lr_override)


def log_method(names: list[str], cfg: DictConfig) -> None:
    """Logs the method's blocks, and for wise_ft the command to start when the run has ended."""
    if not names:
        return
    values = {key: cfg.get(key) for name in ("sft", *names) for key in METHODS[name].blocks if key != "model"}
    kinds = {key: component_of(node) or ("null" if node is None else "on") for key, node in values.items()}
    logger.info(f"method={'+'.join(names)}: {', '.join(f'{key} {kind}' for key, kind in kinds.items())}")
    if "lora" in names and cfg.optimizer.get("lr") == LORA_LR:
        logger.info(f"method=lora: optimizer.lr={LORA_LR:g}, where the paper's grid begins; optimizer.lr=... sets it")
    if "small_lr" in names:
        logger.info(
            f"method=small_lr: optimizer.lr={cfg.optimizer.lr:g}, in place of the paper's rule: the largest rate of its grid with less than "
            "2 points of average forgetting"
        )
    if "wise_ft" in names:
        run, base = cfg.output_dir, str(cfg.checkpointer.get("checkpoint_dir"))
        tuned = "best" if cfg.get("dataset_validation") is not None else f"epoch_{cfg.epochs - 1}"
        logger.info(
            "method=wise_ft: when the run has ended, "
            + shlex.join(["finch", "average", "--base", base, "--tuned", f"{run}/{tuned}", "--out", f"{run}/wise_ft"])
        )


def _is_plain(*components: Any) -> bool:
    """Whether all are plain cross-entropy, by their names, which need no import: the checks refuse what only has the name."""
    return all(str(path).rpartition(".")[2] in _PLAIN_CROSS_ENTROPY for path in components)


def _keep_settings(block: Any, file_block: Any, *, from_file: bool) -> Any:
    """The method's block, with the settings of the file's where both have the same component or are plain cross-entropy. Those of self_replay
    that the method names are its own, unless the file names the method as well."""
    if not isinstance(block, dict):  # null, or a word
        return block
    component, file_component = component_of(block), component_of(file_block)
    if component is None:  # self_replay's
        kept = file_block if isinstance(file_block, dict) else {}
        return {**block, **kept} if from_file else {**kept, **block}
    if not (file_component == component or _is_plain(component, file_component)):
        return copy.deepcopy(block)
    return {**block, **(file_block if isinstance(file_block, dict) else {"_component_": file_component})}
