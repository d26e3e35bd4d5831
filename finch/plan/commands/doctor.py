"""`finch doctor`: the installed packages, the machine, and what does not fit together, with the command that fixes it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from finch.base.extras import DISTRIBUTION, install_command, peft_conflict
from finch.base.extras import version as _version
from finch.base.log import quiet_dependencies

CONTRIBUTOR_EXTRA = "dev"
PURPOSES = {
    "torchtune": "the recipes, and the commands that read configs or weights",
    "evaluate": "finch evaluate, on lm-eval",
    "report": "finch report, and figures such as a run's loss.png",
    "openai": "finch evaluate --judge, through any server with OpenAI's protocol",
    "hf": "finch.integrations.transformers: FINCH in transformers' Trainer and TRL's SFTTrainer",
    "lightning": "finch.integrations.lightning",
    "titan": "finch.titan: FINCH inside TorchTitan",
    "wandb": "metric_logger=wandb",
    "docs": "make docs: the site, in a checkout",
    "tensorboard": "metric_logger=tensorboard",
    "trackio": "metric_logger=trackio",
    "all": "all of these but trackio, lightning, titan, docs and bitsandbytes",
    "bitsandbytes": "the 8-bit optimizers of bitsandbytes, which torchtune's configs name",
}
"""What each extra of pyproject.toml is for."""
_FOR = {"evaluate": "lm-eval", "report": "matplotlib", "hf": "accelerate", "titan": "torchtitan", "docs": "mkdocs"}
"""The package that an extra is for, where it has another name. Its others are in the environments of other extras too."""
# A Hugging Face folder and a resumable checkpoint of a 4B model in pure bf16 have about 8 and 24 GB.
COMFORTABLE_FREE_BYTES = 50 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "also import torchtune, and print torch's collect_env and pip check"
    parser.add_argument("--full", action="store_true", help=text)


def main(parsed: argparse.Namespace) -> None:
    """Prints the report; ends the process with 1 if there are problems."""
    print(f"python       {platform.python_version()} ({sys.executable})")
    print(f"finch        {_version(DISTRIBUTION) or 'not installed'}")
    extras: list[str] = []
    problems = list(_package_problems(extras))
    if _version("torch"):
        problems += _device_problems()
    free = shutil.disk_usage(Path.cwd()).free
    print(f"free disk    {free / 1e9:.0f} GB in {Path.cwd()}")
    if free < COMFORTABLE_FREE_BYTES:
        print(
            "\nnote: a 4B model needs about 8 GB per epoch and 24 GB for its state: where that does not fit, give output_dir on a larger disk"
        )
    if note := peft_conflict(_version("peft"), _version("torchao")):
        print(f"\nnote: {note}")
    if extras:
        print("\noptional packages, by extra:", *extras, sep="\n")
    if parsed.full:
        problems += _slow_problems()
    for problem in problems:
        print(f"\nproblem: {problem}")
    if problems:
        sys.exit(1)
    print("\nno problems found")


def _package_problems(extras: list[str]) -> Iterator[str]:
    """Prints the core's packages and those of the extras in use, each once; adds a line for each extra to ``extras``."""
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:
        for name in ("torch", "torchtune"):
            print(f"{name:<12} {_version(name) or 'not installed'}")
        print("packages     not compared: pip install packaging")
        return
    parsed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    core = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    needed = {one.name: one.specifier for one in core}
    for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        own = {
            one.name: one.specifier
            for one in parsed
            if one not in core
            and one.name != DISTRIBUTION  # an extra of extras
            and (one.marker is None or one.marker.evaluate({"extra": extra}))
        }
        if not own or extra == CONTRIBUTOR_EXTRA:
            continue
        is_used = _version(_FOR.get(extra, extra)) is not None
        state = "installed" if is_used else install_command(extra)
        extras.append(f"{extra:<12} {state:<40} {PURPOSES.get(extra, '')}".rstrip())
        for name, specifier in own.items() if is_used else ():
            needed[name] = needed.get(name, SpecifierSet()) & specifier
    for name, specifier in needed.items():
        version = _version(name)
        print(f"{name:<12} {version or 'not installed'}")
        if version is None:
            yield f"{name} is missing: pip install '{name}{specifier}'"
        elif not specifier.contains(version, prereleases=True):
            yield f"{name} {version} is outside {specifier}: pip install '{name}{specifier}'"


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
            bf16 = "bf16" if torch.version.hip or properties.major >= 8 else "no bf16"
            print(f"cuda:{index:<7} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
        if not backends["nccl"]:
            yield "this torch has no NCCL, which several GPUs need: install a Linux build of torch with CUDA"
    else:
        print("cuda         none")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not _driver_lists_gpus():
            pass
        elif visible is not None and torch.version.cuda:
            yield f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs that `nvidia-smi -L` lists: unset it, or name some"
        else:
            build = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            yield (
                f"there is an NVIDIA driver, but torch ({build}) sees no GPU: "
                "pip install uv && uv pip install --torch-backend=auto --reinstall 'torch>=2.11'"
            )
    print(f"backends     {', '.join(name for name, is_available in backends.items() if is_available) or 'none'}")


def _driver_lists_gpus() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _slow_problems() -> Iterator[str]:
    quiet_dependencies()
    if _version("torchtune"):
        try:
            import torchtune  # noqa: F401
        except Exception as error:
            reason = " ".join(str(error).split())[:150]
            yield f"torchtune does not import ({reason}): {install_command('torchtune')} --force-reinstall"
    for package, *command in (["torch", "torch.utils.collect_env"], ["pip", "pip", "check"]):
        if _version(package):
            print(f"\npython -m {' '.join(command)}", flush=True)
            if subprocess.call([sys.executable, "-m", *command]) != 0:
                yield f"{' '.join(command)} has failed; its output is above"
