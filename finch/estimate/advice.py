"""What to change in a config whose step does not fit into memory: each change is tried on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from finch.config.instantiate import component_of
from finch.estimate.fake_step import StepEstimate

_EIGHT_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}


@dataclass(frozen=True)
class Change:
    """
    Attributes:
        overrides: as on the command line.
        effect: on the run's result and its time.
        ranks: how many.
    """

    overrides: tuple[str, ...]
    effect: str
    ranks: int

    def __str__(self) -> str:
        return " ".join((*self.overrides, f"--gpus {self.ranks}"))


@dataclass(frozen=True)
class Trial:
    """A change with the step that it gives."""

    change: Change
    step: StepEstimate


def changes(cfg: DictConfig, ranks: int) -> Iterator[Change]:
    """What saves memory, the cheapest first; the number of samples a step stays what it is wherever it can.

    Args:
        cfg: of the step that does not fit.
        ranks: it was meant for.
    """
    accumulation = cfg.gradient_accumulation_steps
    overrides: tuple[str, ...]
    if not cfg.enable_activation_checkpointing and cfg.ac_mode is None:
        yield Change(("enable_activation_checkpointing=True",), "the same result, about a third slower", ranks)
    if cfg.batch_size > 1 and not cfg.optimizer_in_bwd:  # which excludes accumulation
        overrides = ("batch_size=1", f"gradient_accumulation_steps={accumulation * cfg.batch_size}")
        yield Change(overrides, "the same result, slower", ranks)
    for more in (2, 4, 8) if cfg.data_parallel_shard_dim == -1 else ():
        if accumulation % more == 0:
            overrides = (f"gradient_accumulation_steps={accumulation // more}",)
        elif cfg.batch_size * accumulation % more == 0:
            overrides = (f"batch_size={cfg.batch_size * accumulation // more}", "gradient_accumulation_steps=1")
        else:
            overrides = ()
        effect = "the same result, more GPUs" if overrides else "more GPUs and more samples a step"
        yield Change(overrides, effect, more * ranks)
    component = component_of(cfg.optimizer) or ""
    if component in _EIGHT_BITS:
        removed = tuple(f"~optimizer.{key}" for key in ("fused", "foreach") if key in cfg.optimizer)
        overrides = (f"optimizer._component_={_EIGHT_BITS[component]}", *removed)
        yield Change(overrides, "optimizer states in 8 bits: another result", ranks)
    if not cfg.fsdp_cpu_offload:
        yield Change(
            ("fsdp_cpu_offload=True",), "weights and states in host memory: the same result, much slower", ranks
        )


def trials(
    cfg: DictConfig, ranks: int, limit: int, estimate: Callable[[Sequence[str], int], StepEstimate]
) -> Iterator[Trial]:
    """Tries changes, each alone, until one is enough on the same ranks and one with more; all on the same ranks together where none is.

    Args:
        cfg, ranks: of the step that does not fit.
        limit: bytes of memory of a rank.
        estimate: the step with further overrides on a number of ranks.
    """
    has_fit = {False: False, True: False}  # by whether it takes more ranks
    tried: list[Change] = []
    for change in changes(cfg, ranks):
        takes_more = change.ranks > ranks
        if has_fit[takes_more]:
            continue
        step = estimate(change.overrides, change.ranks)
        has_fit[takes_more] = step.device_peak <= limit
        tried.append(change)
        yield Trial(change, step)
    overrides = tuple(override for change in tried if change.ranks == ranks for override in change.overrides)
    if overrides and not has_fit[False]:
        together = Change(overrides, "all of these on the same GPUs", ranks)
        yield Trial(together, estimate(together.overrides, ranks))
