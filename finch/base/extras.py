"""The optional dependencies of pyproject.toml: without them, a one-line error in place of a failed import."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

from finch.base.errors import UserError, report_user_errors
from finch.base.log import quiet_dependencies

PACKAGES = {
    "torchtune": ("torchtune", "torchao"),
    "evaluate": ("lm_eval",),
    "report": ("matplotlib",),
    "openai": ("openai",),
    "hf": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
"""Extra -> the packages that nothing but this extra installs; the others of the extra come with them."""


def require_extras(program: str, *extras: str) -> None:
    """Checks that extras, keys of ``PACKAGES``, are installed, without importing them; ``program`` is what needs them.

    Raises UserError with the pip command if one is not.
    """
    if any(find_spec(package) is None for extra in extras for package in PACKAGES[extra]):
        names = " and ".join(extras) + (" extras" if len(extras) > 1 else " extra")
        raise UserError(f"{program} needs the {names}: pip install 'finch-finetune[{','.join(extras)}]'")


def prepare_recipe() -> None:
    """Called before a recipe imports torchtune: without it the program ends with one line, and with it the import is quiet."""
    report_user_errors(require_extras)("the recipe", "torchtune")
    quiet_dependencies()


def version(package: str) -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def peft_conflict(peft: str | None, torchao: str | None) -> str | None:
    """Why these versions do not load adapters together, and the way out; None where they do, or one is not installed."""
    if peft is None or torchao is None or _numbers(peft) < (0, 19, 1) or _numbers(torchao) >= (0, 16):
        return None
    return f'peft {peft} loads no adapter next to torchao {torchao}, unless sys.modules["torchao"] = None is set before it is imported'


def _numbers(text: str) -> tuple[int, ...]:
    # Without a local part such as +cu126, whose digits would count as another number.
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))
