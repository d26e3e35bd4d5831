"""`finch doctor`: what is installed, what the machine has, and what does not fit together, with the command that mends it."""

from __future__ import annotations

import logging
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "finch-finetune"
# A Hugging Face folder and a resumable state of a 4B model in pure bf16 take about 8 and 24 GB.
COMFORTABLE_FREE_BYTES = 50 * 10**9


def main() -> int:
    """Prints the report; returns the number of problems."""
    print(f"python       {platform.python_version()} ({sys.executable})")
    print(f"finch        {_version(DISTRIBUTION) or 'not installed'}")
    for name in map(_name, _requirements()):
        print(f"{name:<12} {_version(name) or 'not installed'}")
    if _version("torchtune") is None:
        print("torchtune    not installed; the recipe needs it: pip install 'finch-finetune[torchtune]'")
    problems = list(_version_problems())
    problems += _devices() if _version("torch") else []
    free = shutil.disk_usage(Path.cwd()).free
    print(f"free disk    {free / 1e9:.0f} GB in {Path.cwd()}")
    if free < COMFORTABLE_FREE_BYTES:
        problems.append(
            f"{free / 1e9:.0f} GB are free here; a 4B model needs about 8 GB an epoch and 24 GB for its state: give output_dir on a larger disk"
        )
    if not problems:
        print("\nall of this fits together")
    for problem in problems:
        print(f"\nproblem: {problem}")
    return len(problems)


def _requirements() -> list[str]:
    """What finch asks for: torch, and the packages of the torchtune extra where torchtune is installed."""
    markers = ["", "extra == 'torchtune'"] if _version("torchtune") else [""]
    parts = [text.replace('"', "'").partition(";") for text in metadata.requires(DISTRIBUTION) or []]
    return [requirement.strip() for requirement, _, marker in parts if marker.strip() in markers]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def _version_problems() -> Iterator[str]:
    """Compares what is installed with the ranges that finch itself asks for."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # torch alone does not bring it
        print("ranges       not compared: pip install packaging")
        return
    for requirement in map(Requirement, _requirements()):
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is missing: pip install '{requirement}'"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is outside {requirement.specifier}: pip install '{requirement}'"


def _devices() -> list[str]:
    problems = []
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return [f"torch does not import ({' '.join(str(error).split())[:150]}): pip install --force-reinstall torch"]
    backends = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    print(f"cpu          {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            print(f"cuda:{index:<7} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
        if "nccl" not in backends:
            problems.append(
                "this torch has no NCCL, so that several GPUs cannot work together: install a Linux build of torch with CUDA"
            )
    else:
        print("cuda         none")
        if shutil.which("nvidia-smi") is not None:
            build = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            problems.append(
                f"there is an NVIDIA driver, but torch ({build}) sees no GPU: pip install uv && uv pip install --torch-backend=auto --reinstall 'torch>=2.11'"
            )
    print(f"backends     {', '.join(backends) or 'none'}")
    if _version("torchtune") is None:
        return problems
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it misses C++ extensions that nothing here uses
    try:
        import torchtune  # noqa: F401
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        problems.append(f"torchtune does not import ({reason}): pip install 'finch-finetune[torchtune]'")
    return problems


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
