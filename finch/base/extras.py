"""The optional dependencies of pyproject.toml: without them, a one-line error in place of a failed import."""

from __future__ import annotations

import contextlib
import json
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from finch.base.errors import UserError, report_user_errors
from finch.base.log import quiet_dependencies

DISTRIBUTION = "finch-finetune"
PACKAGES = {
    "torchtune": ("torchtune", "torchao"),
    "evaluate": ("lm_eval",),
    "report": ("matplotlib",),
    "openai": ("openai",),
    "hf": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "trackio": ("trackio",),
}
"""Extra -> the packages that nothing but this extra installs; the others of the extra come with them."""


def require_extras(program: str, *extras: str) -> None:
    """Checks that extras, keys of ``PACKAGES``, are installed, without importing them; ``program`` is what needs them.

    Raises UserError with the pip command if one is not, or torchtune is not the released one.
    """
    if any(find_spec(package) is None for extra in extras for package in PACKAGES[extra]):
        names = " and ".join(extras) + (" extras" if len(extras) > 1 else " extra")
        raise UserError(f"{program} needs the {names}: {install_command(*extras)}")
    # On the main branch a row's labels come shifted, and a model would learn to repeat each token.
    if "torchtune" in extras and not (found := version("torchtune") or "").startswith("0.6."):
        raise UserError(f"{program} needs torchtune 0.6, not {found}: pip install 'torchtune==0.6.1'")


def install_command(*extras: str) -> str:
    """The pip command that adds extras to this installation, from the checkout or the wheel that it was made from."""
    source, is_editable = DISTRIBUTION, False
    with contextlib.suppress(metadata.PackageNotFoundError, TypeError, ValueError, KeyError):
        # PEP 610; without the file, which makes json raise TypeError, the package is an index's.
        made_from = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json"))  # type: ignore[arg-type]
        path = Path(url2pathname(urlsplit(made_from["url"]).path))
        if made_from["url"].startswith("file:") and path.exists():
            source = "." if path == Path.cwd() else str(path)
            is_editable = made_from.get("dir_info", {}).get("editable", False)
    return f"pip install {'-e ' if is_editable else ''}'{source}[{','.join(extras)}]'"


def missing_after_training() -> str | None:
    """What cannot be made of a run, or with it, for want of a package; None: all can."""
    needs = {"report": "RUN/loss.png is not drawn", "evaluate": "finch evaluate will not start"}
    missing = {extra: text for extra, text in needs.items() if find_spec(PACKAGES[extra][0]) is None}
    packages = ", ".join(PACKAGES[extra][0] for extra in missing)
    return f"without {packages}, {' and '.join(missing.values())}: {install_command(*missing)}" if missing else None


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
