"""A recipe from its checks to the end of the process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

from omegaconf import DictConfig

from finch.distributed import parallel
from finch.distributed.processes import die_with_parent
from finch.errors import UserError
from finch.log import logger


class Recipe(Protocol):
    """What ``run`` needs of a recipe."""

    interrupted: bool
    """Whether Ctrl-C has ended the run."""

    def setup(self, cfg: DictConfig) -> Any: ...
    def train(self) -> Any: ...
    def close(self) -> None: ...
    def cleanup(self) -> Any: ...


def run(recipe_class: Callable[[DictConfig], Recipe], cfg: DictConfig) -> None:
    """Runs a recipe. Ctrl-C, once the state is saved, ends the process with exit code 130.

    Raises:
        UserError: a mistake in the config, or a loss, gradient or weight that is not finite.
    """
    if parallel.is_launched():
        die_with_parent()
    recipe = recipe_class(cfg)
    logger.setLevel(str(cfg.log_level).upper())
    try:
        recipe.setup(cfg)
        recipe.train()
    except FloatingPointError as error:
        recipe.close()
        raise UserError(str(error)) from error
    except BaseException:
        recipe.close()
        raise
    recipe.cleanup()
    if recipe.interrupted:
        sys.exit(128 + signal.SIGINT)
