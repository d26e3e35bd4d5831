"""`finch doctor`: the installed packages, the machine, and what does not fit together, with the command that fixes it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from finch.log import quiet_dependencies

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "finch-finetune"
CONTRIBUTOR_EXTRA = "dev"
PURPOSES = {
    "torchtune": "the recipes, and the commands that read configs or weights",
    "evaluate": "finch evaluate, on lm-eval",
    "report": "finch report, and figures such as a run's loss.png",
    "openai": "finch data translate and finch judge, through any server with OpenAI's protocol",
    "hf": "finch.integrations.transformers: FINCH in transformers' Trainer and TRL's SFTTrainer",
    "lightning": "finch.integrations.lightning",
    "titan": "finch.titan: FINCH inside TorchTitan",
    "wandb": "metric_logger=torchtune.training.metric_logging.WandBLogger",
    "tensorboard": "metric_logger=torchtune.training.metric_logging.TensorBoardLogger",
    "bitsandbytes": "the 8-bit optimizers of bitsandbytes, which torchtune's configs name",
}
"""What each extra of pyproject.toml is for."""
# A Hugging Face folder and a resumable checkpoint of a 4B model in pure bf16 have about 8 and 24 GB.
COMFORTABLE_FREE_BYTES = 50 * 10**9


def main() -> int:
    """Prints the report; returns the number of problems."""
    print(f"python       {platform.python_version()} ({sys.executable})")
    print(f"finch        {_version(DISTRIBUTION) or 'not installed'}")
    problems: list[str] = []
    extras = []
    for extra, requirements in _requirements().items():
        is_used = not extra or _is_used(extra, requirements)
        if extra:
            state = "installed" if is_used else f"pip install '{DISTRIBUTION}[{extra}]'"
            extras.append(f"{extra:<12} {state:<40} {PURPOSES.get(extra, '')}".rstrip())
        for requirement in requirements if is_used else ():
            print(f"{requirement.name:<12} {_version(requirement.name) or 'not installed'}")
            problems += _version_problems(requirement)
    if _version("torch"):
        problems += _device_problems()
    if _version("torchtune"):
        problems += _torchtune_problems()
    free = shutil.disk_usage(Path.cwd()).free
    print(f"free disk    {free / 1e9:.0f} GB in {Path.cwd()}")
    if free < COMFORTABLE_FREE_BYTES:
        problems.append(
            f"{free / 1e9:.0f} GB are free here; a 4B model needs about 8 GB an epoch and 24 GB for its state: give output_dir on a larger disk"
        )
    if extras:
        print("\noptional packages, by extra:", *extras, sep="\n")
    if not problems:
        print("\nno problems found")
    for problem in problems:
        print(f"\nproblem: {problem}")
    return len(problems)


def _requirements() -> dict[str, list[Requirement]]:
    """What finch requires here, by extra; the core's under the empty name, and in no other list."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        for name in ("torch", "torchtune"):
            print(f"{name:<12} {_version(name) or 'not installed'}")
        print("packages     not compared: pip install packaging")
        return {}
    parsed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    required: dict[str, list[Requirement]] = {"": []}
    for extra in ("", *(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or [])):
        requirements = [
            requirement
            for requirement in parsed
            if (requirement.marker is None or requirement.marker.evaluate({"extra": extra}))
            and requirement.name != DISTRIBUTION  # an extra of extras
            and requirement not in required[""]
        ]
        if requirements and extra != CONTRIBUTOR_EXTRA:
            required[extra] = requirements
    return required


def _is_used(extra: str, requirements: list[Requirement]) -> bool:
    """Whether the package that the extra is named after is installed, or any of it if none is."""
    names = [requirement.name for requirement in requirements]
    return any(_version(name) for name in ([extra] if extra in names else names))


def _version_problems(requirement: Requirement) -> Iterator[str]:
    version = _version(requirement.name)
    needed = f"'{requirement.name}{requirement.specifier}'"
    if version is None:
        yield f"{requirement.name} is missing: pip install {needed}"
    elif not requirement.specifier.contains(version, prereleases=True):
        yield f"{requirement.name} {version} is outside {requirement.specifier}: pip install {needed}"


def _device_problems() -> Iterator[str]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield f"torch does not import ({' '.join(str(error).split())[:150]}): pip install --force-reinstall torch"
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    print(f"cpu          {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            print(f"cuda:{index:<7} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
        if not backends["nccl"]:
            yield "this torch has no NCCL, which several GPUs need: install a Linux build of torch with CUDA"
    else:
        print("cuda         none")
        if shutil.which("nvidia-smi") is not None:
            build = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            yield (
                f"there is an NVIDIA driver, but torch ({build}) sees no GPU: "
                "pip install uv && uv pip install --torch-backend=auto --reinstall 'torch>=2.11'"
            )
    print(f"backends     {', '.join(name for name, is_available in backends.items() if is_available) or 'none'}")


def _torchtune_problems() -> Iterator[str]:
    quiet_dependencies()
    try:
        import torchtune  # noqa: F401
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        yield f"torchtune does not import ({reason}): pip install --force-reinstall '{DISTRIBUTION}[torchtune]'"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
