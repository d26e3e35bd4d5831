"""The optional dependencies of pyproject.toml: without them, a one-line error in place of a failed import."""

from __future__ import annotations

from importlib.util import find_spec

from finch.errors import UserError, report_user_errors
from finch.log import quiet_dependencies

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
