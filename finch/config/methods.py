"""The methods by name: ``method=talr``, in a config file or on the command line, makes any config train with TALR.

A method sets the blocks ``lr_scheduler``, ``loss`` and ``regularizer``. All of them stand on SFT's (cosine, plain
cross-entropy, no regularizer); names joined by ``+`` each bring their own: ``method=finch+talr`` is FINCH's schedule
with TALR's weights. What a config file says gives way to the method, and the method to the rest of the command line:

    file  <  method  <  key=value

A block of the file that has the method's component already keeps its settings. The key ``method`` is used up by this:
a run's config.yaml holds the blocks it stands for.

`finch methods` works at once and without the torchtune extra: omegaconf is imported only where a method is applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finch.config.registry import did_you_mean
from finch.errors import UserError
from finch.log import logger

if TYPE_CHECKING:
    from omegaconf import DictConfig

Blocks = dict[str, Any]
"""Top-level keys of a config, as read from YAML."""

ETA_MAX_RATIO = 2.5
"""eta_max over eta_base, where no cap is given: the paper's 5e-5 over 2e-5."""

SMALL_LR_SHARE = 0.1
"""The learning rate of small_lr over the config's."""

SFT: Blocks = {
    "lr_scheduler": {"_component_": "finch.cosine.cosine_with_warmup", "warmup_fraction": 0.05},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "regularizer": None,
}

LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 64,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
}

UNRESOLVED = "???"  # omegaconf's mark of a value still to come
_PLAIN_CROSS_ENTROPY = (
    "torch.nn.CrossEntropyLoss",
    "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "torchtune.modules.loss.LinearCrossEntropyLoss",
)


@dataclass(frozen=True)
class MethodContext:
    """What a method may look at once file, method and command line are one config.

    Attributes:
        cfg: that config, to be completed in place.
        in_file: what the file alone says.
        overrides: the command line's ``key=value``.
        name: what stands behind ``method=``.
    """

    cfg: DictConfig
    in_file: DictConfig
    overrides: list[str]
    name: str

    def learning_rate(self) -> float:
        from omegaconf import OmegaConf

        rate = OmegaConf.select(self.cfg, "optimizer.lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise UserError(
                f"optimizer.lr={rate} must be a number above 0, since method={self.name} depends on it; set it in the file or on the command line"
            )
        return float(rate)


@dataclass(frozen=True)
class Method:
    """``blocks``: what it sets on top of SFT's; ``complete``: what depends on the rest of the config, done last."""

    summary: str
    blocks: Blocks = field(default_factory=dict)
    complete: Callable[[MethodContext], None] | None = None


def _scale_lr(context: MethodContext) -> None:
    if not any(override.startswith("optimizer.lr=") for override in context.overrides):
        context.cfg.optimizer.lr = _tidy(SMALL_LR_SHARE * context.learning_rate())


def _set_cap(context: MethodContext) -> None:
    """A cap belongs to the scale of its eta_base: the file's holds for the file's learning rate alone."""
    from omegaconf import OmegaConf

    schedule = context.cfg.lr_scheduler
    if _component(schedule) is None or not OmegaConf.is_missing(schedule, "eta_max"):
        return  # the command line has removed the block, or set the cap
    rate = context.learning_rate()
    cap = OmegaConf.select(context.in_file, "lr_scheduler.eta_max")
    unchanged = _component(context.in_file.get("lr_scheduler")) == "finch.FinchLR" and cap is not None
    if unchanged and OmegaConf.select(context.in_file, "optimizer.lr") == rate:
        schedule.eta_max = cap
    else:
        schedule.eta_max = _tidy(ETA_MAX_RATIO * rate)


def _need_log(context: MethodContext) -> None:
    from omegaconf import OmegaConf

    schedule = context.cfg.lr_scheduler
    if _component(schedule) is not None and OmegaConf.is_missing(schedule, "log"):
        raise UserError(
            f"method={context.name} replays the learning rates of an earlier run: add lr_scheduler.log=RUN, its folder or metrics.jsonl"
        )


def _add_adapters(context: MethodContext) -> None:
    """After the merge, so that a builder given on the command line is turned into its twin as well."""
    model = context.cfg.get("model")
    path = _component(model)
    if path is None:
        return  # told by the check of the whole config
    if isinstance(model, str):
        model = context.cfg.model = {"_component_": path}
    module, _, builder = path.rpartition(".")
    if not builder.startswith(("lora_", "qlora_")):
        context.cfg.model["_component_"] = f"{module}.lora_{builder}"
    for key, value in LORA.items():
        if key not in context.cfg.model:
            context.cfg.model[key] = value


METHODS: dict[str, Method] = {
    "sft": Method("plain fine-tuning: cross-entropy, 5% linear warm-up, cosine to 0", SFT),
    "small_lr": Method("sft at a tenth of the config's optimizer.lr, unless optimizer.lr is given", complete=_scale_lr),
    "finch": Method(
        "a learning rate that follows the loss: min(eta_base / sqrt(EMA of the loss), eta_max), eta_base = optimizer.lr",
        {"lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": UNRESOLVED, "ema": 0.9, "init": "dataset"}},
        _set_cap,
    ),
    "flow": Method(
        "sequences that the pretrained model finds easy weigh more", {"loss": {"_component_": "finch.objectives.FLOW"}}
    ),
    "dft": Method("each token's loss is scaled by its probability", {"loss": {"_component_": "finch.objectives.DFT"}}),
    "talr": Method(
        "dft with a sharpness that follows the loss of the batch, and a least weight",
        {"loss": {"_component_": "finch.objectives.TALR"}},
    ),
    "stm": Method(
        "only tokens that the pretrained model finds easy are learnt",
        {"loss": {"_component_": "finch.objectives.STM"}},
    ),
    "eaft": Method(
        "tokens that the model is unsure about weigh more", {"loss": {"_component_": "finch.objectives.EAFT"}}
    ),
    "l2": Method(
        "sft with a pull toward the pretrained weights",
        {"regularizer": {"_component_": "finch.regularization.L2", "strength": 1.0e-3}},
    ),
    "lora": Method(
        "sft of low-rank adapters on all linear layers, rank 64; with tune run finch_lora_finetune",
        {"model": LORA},
        _add_adapters,
    ),
    "wise_ft": Method("sft; `finch wise-ft` then makes the mean of the pretrained and the tuned weights"),
    "replay": Method(
        "sft with the learning rates of an earlier run, lr_scheduler.log=RUN",
        {"lr_scheduler": {"_component_": "finch.ReplayLR", "log": UNRESOLVED}},
        _need_log,
    ),
}


def split_name(name: str) -> list[str]:
    """``finch+talr`` to its names.

    Raises:
        UserError: a name that is not known, twice the same, or two that set the same block.
    """
    names = name.split("+")
    for one in names:
        if one not in METHODS:
            near = did_you_mean(one, METHODS)
            raise UserError(
                f"method={name} is not known{near or '; known are ' + ', '.join(METHODS) + ', joined by +'}"
            )
    owner: dict[str, str] = {}
    for one in names:
        if names.count(one) > 1:
            raise UserError(f"method={name} names {one} more than once; name it once")
        for block in METHODS[one].blocks:
            if block in owner:
                raise UserError(f"method={name}: {owner[block]} and {one} both set {block}; name one of them")
            owner[block] = one
    return names


def apply_method(in_file: Blocks, overrides: list[str]) -> tuple[Blocks, list[str], list[str]]:
    """Puts the method's blocks over the file's; what depends on the command line is left open for ``complete``.

    Args:
        in_file: the file's top-level keys, left as they are.
        overrides: the command line's; its ``method`` goes before the file's, null and ``~method`` are none.

    Returns:
        The file's keys with the method's blocks; the overrides that remain; the method's names, none without a method.

    Raises:
        UserError: see ``split_name``.
    """
    blocks = copy.deepcopy(in_file)
    name = blocks.pop("method", None)
    remaining = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("method", "~method"):
            name = None if value in ("", "null", "None") else value
        else:
            remaining.append(override)
    if name is None:
        return blocks, remaining, []
    names = split_name(str(name))
    for one in ("sft", *names):
        for key, block in METHODS[one].blocks.items():
            if key != "model":  # LoRA's, which must wait for the builder that the command line may name
                blocks[key] = _keep_settings(block, in_file.get(key))
    return blocks, remaining, names


def complete(names: list[str], cfg: DictConfig, in_file: Blocks, overrides: list[str]) -> None:
    """Fills in, in place, what depends on the context config ``cfg``.

    Raises:
        UserError: something it depends on is missing or not a number.
    """
    from omegaconf import OmegaConf

    context = MethodContext(cfg, OmegaConf.create(in_file), overrides, "+".join(names))
    for name, method in METHODS.items():  # in the table's order: small_lr sets the rate that finch's cap refers to
        if name in names and method.complete is not None:
            method.complete(context)


def log_method(names: list[str], cfg: DictConfig) -> None:
    """Logs, on rank 0, the blocks that the method has become, and the command that follows the run if one does."""
    if not names:
        return
    blocks = ", ".join(f"{key} {_component(cfg.get(key)) or 'null'}" for key in SFT)
    logger.info(f"method={'+'.join(names)}: {blocks}")
    if "wise_ft" in names:
        run = cfg.output_dir
        tuned = "best" if cfg.get("dataset_validation") is not None else f"epoch_{cfg.epochs - 1}"
        logger.info(
            f"method=wise_ft: when the run has ended, finch wise-ft --base {cfg.checkpointer.get('checkpoint_dir')} --tuned {run}/{tuned} --out {run}/wise_ft"
        )


def _keep_settings(block: Any, in_file: Any) -> Any:
    ours, theirs = _component(block), _component(in_file)
    if ours is not None and (theirs == ours or {ours, theirs} <= set(_PLAIN_CROSS_ENTROPY)):
        kept = {**block, **(in_file if isinstance(in_file, dict) else {"_component_": theirs})}
        return {**kept, "eta_max": UNRESOLVED} if "eta_max" in kept else kept
    return copy.deepcopy(block)


def _component(block: Any) -> str | None:
    """A block's component; also in torchtune's short form, ``loss: torch.nn.CrossEntropyLoss``."""
    if isinstance(block, str):
        return block
    return block.get("_component_") if isinstance(block, Mapping) else None


def _tidy(number: float) -> float:
    """2.5 * 3e-4 is 0.00075, and should be written so."""
    return float(f"{number:.12g}")
