"""The versions of TorchTitan whose seams finch uses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from finch.errors import UserError

LOWEST, BELOW = (0, 3), (0, 4)
_INSTALL = "pip install 'finch-finetune[titan]'"


def check_version() -> None:
    """Checks the installed TorchTitan without importing it.

    Raises:
        UserError: there is none, or it is outside the range.
    """
    try:
        installed = version("torchtitan")
    except PackageNotFoundError as error:
        raise UserError(f"finch.titan needs torchtitan, which is not installed: {_INSTALL}") from error
    release = tuple(int(part) if part.isdigit() else -1 for part in installed.split(".")[:2])
    if not LOWEST <= release < BELOW:
        lowest, below = (".".join(map(str, bound)) for bound in (LOWEST, BELOW))
        raise UserError(f"torchtitan={installed} is not supported: finch.titan needs >={lowest},<{below}: {_INSTALL}")
