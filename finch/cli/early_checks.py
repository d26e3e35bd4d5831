"""The checks of a run that need no process group and no weights, for the commands that start runs or only check them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.methods import LORA_RECIPE

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

Check = Callable[[], Any]
"""Raises UserError if something is wrong; text that it returns is a warning."""


def read_job(
    config: str,
    overrides: Sequence[str],
    on_error: Callable[[UserError], None] | None = None,
    ranks: int | None = None,
    *,
    is_here: bool = True,
) -> tuple[str, DictConfig]:
    """The recipe for a config's model, and the checked config.

    Args:
        config: a path or the name of a config of finch.
        overrides: ``key=value`` and ``~key``.
        on_error: called with each wrong key, value or component; None raises the first one.
        ranks: that it is for, on all nodes; None: those that torchrun has started.
        is_here: whether this machine has the files of the run.

    Raises:
        UserError: see :func:`finch.config.parser.read`.
    """
    from finch.config.parser import read, recipe_of

    look = _file_errors if is_here else lambda cfg: ()
    cfg = read(["--config", config, *overrides], None, on_error, ranks, look, is_here=is_here)
    return recipe_of(cfg), cfg


def _file_errors(cfg: DictConfig) -> Iterator[UserError]:
    """What is wrong with the paths of a config, before torch is imported."""
    from finch.data.row_files import file_errors
    from finch.models.hf_config import check_folder

    try:
        check_folder(str(cfg.checkpointer.get("checkpoint_dir")))
    except UserError as error:
        yield error
    if cfg.get("check_dataset", True):
        yield from (error for _, error in file_errors(cfg))


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Silences warnings and notes about a config that the run reads, and logs, again."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def config_checks(cfg: DictConfig, ranks: int | None) -> Iterator[Check]:
    """What can be checked on a machine that has neither the run's files nor its devices.

    Args:
        ranks: how many will be started; None: not known.
    """
    from finch.distributed.parallel import MeshSizes
    from finch.probes.probes import check_probes
    from finch.training.config_checks import check_output_folder, check_schedule

    # Each is called by the one who asks, so that `finch check` can report all that fail.
    yield lambda: check_schedule(cfg)
    yield lambda: check_probes(cfg)
    yield lambda: check_output_folder(cfg)
    if ranks is not None:
        sizes = MeshSizes(cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim)
        yield lambda: sizes.resolve(ranks)


def machine_checks(recipe: str, cfg: DictConfig, ranks: int, *, waits: bool = False) -> Iterator[Check]:
    """What can be checked of a config where the run will start, in addition to :func:`config_checks`.

    Args:
        waits: whether the run will wait until nothing else runs in its folder.
    """
    from finch.distributed.precision import check_hardware
    from finch.training.config_checks import check_combinations, check_lora_combinations
    from finch.training.run import RunLock

    device = device_of(cfg)
    if recipe == LORA_RECIPE:
        yield lambda: check_lora_combinations(cfg)
    yield lambda: check_hardware(cfg.dtype, device)
    yield lambda: check_combinations(cfg, device, ranks)
    if not waits:
        yield lambda: RunLock(Path(cfg.output_dir)).check()


def device_of(cfg: DictConfig) -> torch.device:
    """The kind of device that the run will use. Creates no CUDA context, unlike ``parallel.local_device``.

    Raises:
        UserError: the device does not exist here.
    """
    import torch

    from finch.distributed.parallel import local_device

    if cfg.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    return local_device(cfg.device)


def build_model(recipe: str, cfg: DictConfig) -> Any:
    """The run's ``LoadedModel`` on the meta device, after all its checks. Raises UserError if the model does not fit the pretrained folder."""
    from finch.distributed.precision import precision_of
    from finch.training.loaded_model import LoadedModel

    return LoadedModel(cfg, precision_of(cfg.dtype), has_adapters=recipe == LORA_RECIPE)
