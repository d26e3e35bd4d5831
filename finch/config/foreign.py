"""Configs of finished runs, which somebody else may have written: read without importing or running what is not finch's or torchtune's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.config.instantiate import component_of, first_line, locate
from finch.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_OWN = re.compile(
    r"finch\.models\.[\w.]+|finch\.objectives\.\w+|finch\.data\.\w+\.\w+_dataset"
    r"|torchtune\.(models|data|modules\.(loss|transforms))\.[\w.]+|torchtune\.datasets\.[\w.]+_dataset|torchtune\.training\.FullModel\w+"
)
"""What builds models, tokenizers, rows and losses. The packages have other functions, which write files or call servers."""
_LOSS = "torch.nn.CrossEntropyLoss"


def refuse_foreign(cfg: DictConfig, file: Path, keys: Iterable[str]) -> None:
    """For a config that somebody else may have written, before anything of it is built.

    Raises UserError if a value asks for something of this machine, or one of the blocks ``keys`` cannot be resolved, or names a component
    that is no model, tokenizer, dataset or loss of finch or torchtune. Of these packages modules are imported, of others none.
    """
    from omegaconf import OmegaConf

    if resolver := re.search(r"\$\{[^{}]*:[^{}]*\}", str(OmegaConf.to_container(cfg))):
        raise UserError(
            f"{file} asks for {resolver[0]}, which only a config that you name yourself may do; write the value"
        )
    for key in keys:
        try:
            block = cfg.get(key)
            block = OmegaConf.to_container(block, resolve=True) if OmegaConf.is_config(block) else block
        except Exception as error:  # omegaconf's errors have no common class
            raise UserError(f"{file}: {key} cannot be resolved ({first_line(error)})") from error
        for path in _components(block):
            if path != _LOSS and not (_OWN.fullmatch(path) and _is_defined_there(locate(path, key))):
                raise UserError(
                    f"{file}: {key} names {path}, which is not of finch or torchtune; a config that is not named on the command line may name nothing else"
                )


def _components(node: Any) -> Iterator[str]:
    """The dotted paths in a block; a block that is a text is one."""
    if (path := component_of(node)) is not None:
        yield str(path)
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        if isinstance(part, (dict, list)):
            yield from _components(part)


def _is_defined_there(component: Any) -> bool:
    """Whether it is the packages' own; modules have other packages' functions as attributes."""
    return str(getattr(component, "__module__", "")).startswith(("finch.", "torchtune."))
