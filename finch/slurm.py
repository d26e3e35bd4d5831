"""`finch slurm submit`: checks a run where it is submitted, fills in the sbatch script and hands it to Slurm."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finch.errors import UserError

SCRIPT_FOLDERS = [
    Path(__file__).parent / "slurm_scripts",  # in an installed wheel
    Path(__file__).parent.parent / "slurm",  # in a checkout
]
SCRIPT = "finch_full_finetune.sbatch"
# sbatch's options that may stand apart from their value; the others are handed on as --option=value.
_KNOWN_OPTIONS = ("time", "partition", "account", "qos", "job-name", "cpus-per-task", "mem", "constraint", "output")
_OTHER_WAYS_TO_GPUS = ("gpus", "gres", "gpus-per-task", "gpus-per-socket")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``submit``. Overrides and sbatch's other options are what the parser leaves over."""
    parser.epilog = (
        f"sbatch's {', '.join('--' + name for name in _KNOWN_OPTIONS)} take their value after a space or =; any other option of "
        "sbatch's is handed on as --option=value. key=value and ~key change the config, as for `tune run`."
    )
    parser.add_argument("config", metavar="CONFIG", help="a path, or a name of `finch configs`")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="default: 1; 0: ranks on the CPU")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: one a GPU")
    for name in _KNOWN_OPTIONS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)  # the epilog has them
    parser.add_argument("--container", metavar="IMAGE", help="run in this image")
    parser.add_argument("--container-runtime", choices=["pyxis", "apptainer"], help="default: the script's, pyxis")
    parser.add_argument(
        "--container-mounts", metavar="DIR,DIR", help="besides the working directory and output_dir; same paths inside"
    )
    parser.add_argument("--setup", type=Path, metavar="FILE", help="a shell file to source first: modules, variables")
    parser.add_argument("--python", metavar="PROGRAM", help="default: this one; with a container: python")
    parser.add_argument("--script", type=Path, metavar="FILE", help="your own copy of the script")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")


@dataclass(frozen=True)
class Submission:
    """What is to be submitted.

    Attributes:
        script: the whole script.
        output_dir: the run's folder, absolute.
        ranks: how many in all, in words.
    """

    script: str
    output_dir: Path
    ranks: str


def submit(chosen: argparse.Namespace, rest: Sequence[str]) -> None:
    """Prints the script, or submits it and says where to look.

    Raises:
        UserError: a mistake in the config or the command; no Slurm here; sbatch refuses.
    """
    submission = prepare(chosen, rest)
    if chosen.dry_run:
        print(submission.script, end="")
        return
    folder = submission.output_dir / "slurm"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # sbatch writes into folders, it makes none
    except OSError as error:
        raise UserError(
            f"output_dir={submission.output_dir} cannot be written ({error.strerror}); give another folder"
        ) from error
    job = _sbatch(submission.script)
    output = chosen.output or folder / f"{job}.out"
    print(f"job {job}: {submission.ranks}, output_dir={submission.output_dir}")
    print(f"  squeue --jobs {job}")
    print(f"  tail -F {output}")
    print(f"  scancel {job}    # saves and ends it; the same command goes on from there")


def prepare(chosen: argparse.Namespace, rest: Sequence[str]) -> Submission:
    """The script for a run that has been checked as far as that goes without its data and weights.

    Args:
        chosen: what ``add_arguments`` has parsed.
        rest: overrides (``key=value``, ``~key``) and further options of sbatch (``--option=value``).

    Raises:
        UserError: see ``finch.config.read``; also a script without the lines to fill in.
    """
    overrides = [word for word in rest if not word.startswith("-")]
    header: dict[str, str | None] = {}
    for word in rest:
        if word.startswith("-"):
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                raise UserError(f"{word}: write options of sbatch in their long form, --option=value")
            header[name] = value if equals else ""
    header.update({name: getattr(chosen, name.replace("-", "_")) for name in _KNOWN_OPTIONS})
    header = {name: value for name, value in header.items() if value is not None}
    header["nodes"] = str(chosen.nodes)
    gpus = _gpus(chosen.gpus_per_node)
    if gpus == 0 or (gpus is None and any(name in header for name in _OTHER_WAYS_TO_GPUS)):
        header["gpus-per-node"] = None
    elif gpus is not None:
        header["gpus-per-node"] = chosen.gpus_per_node
    ranks_per_node = chosen.ranks_per_node
    if ranks_per_node is None and not (gpus is None and "gpus-per-node" in header):
        ranks_per_node = gpus or 1  # with another option for GPUs only Slurm knows
    if chosen.nodes < 1 or (ranks_per_node or 1) < 1:
        raise UserError(
            f"--nodes {chosen.nodes} with {ranks_per_node} ranks each starts nothing; both must be at least 1"
        )

    config = os.path.abspath(chosen.config) if Path(chosen.config).is_file() else chosen.config
    recipe, output_dir = _check(config, overrides, None if ranks_per_node is None else chosen.nodes * ranks_per_node)
    header.setdefault("output", f"{output_dir}/slurm/%j.out")
    overrides = [word for word in overrides if not word.startswith("output_dir=")]
    variables = {
        "RECIPE": recipe,
        "PYTHON": chosen.python or ("python" if chosen.container else sys.executable),
        "RANKS_PER_NODE": "" if chosen.ranks_per_node is None else str(chosen.ranks_per_node),
        "SETUP": None if chosen.setup is None else os.path.abspath(chosen.setup),
        "CONTAINER": chosen.container,
        "CONTAINER_RUNTIME": chosen.container_runtime,
    }
    if chosen.container:
        mounts = [os.getcwd(), str(output_dir), *(chosen.container_mounts or "").split(",")]
        variables["CONTAINER_MOUNTS"] = ",".join(dict.fromkeys(filter(None, mounts)))
    filled = {name: shlex.quote(value) for name, value in variables.items() if value}
    words = [config, f"output_dir={output_dir}", *overrides]
    filled["ARGUMENTS"] = "(\n" + "".join(f"  {shlex.quote(word)}\n" for word in words) + ")"
    script = fill_in(_read_script(chosen.script), header, filled)
    each = "a rank a GPU" if ranks_per_node is None else f"{ranks_per_node} rank{'s' if ranks_per_node > 1 else ''}"
    return Submission(script, output_dir, f"{chosen.nodes} node{'s' if chosen.nodes > 1 else ''} with {each}")


def fill_in(script: str, header: Mapping[str, str | None], variables: Mapping[str, str]) -> str:
    """The script with sbatch's options and its own variables set.

    Args:
        script: a shell script with a block of ``#SBATCH --name=value`` lines and lines ``NAME=...``.
        header: sbatch's options without their dashes; an empty value is a flag, None removes the script's line.
        variables: shell variables, their values quoted as the shell needs it.

    Raises:
        UserError: the script has no ``#SBATCH`` lines, or sets a variable nowhere.
    """
    lines: list[str] = []
    after_header, left = None, dict(header)
    for line in script.splitlines():
        found = re.match(r"#SBATCH\s+--([\w-]+)", line)
        if found and found[1] in header:
            value = left.pop(found[1], None)
            lines += [] if value is None else [_option(found[1], value)]
        else:
            lines.append(line)
        if found:
            after_header = len(lines)
    if after_header is None:
        raise UserError("--script has no #SBATCH lines; start from what --dry-run prints without it")
    lines[after_header:after_header] = [_option(name, value) for name, value in left.items() if value is not None]
    filled = "\n".join(lines) + "\n"
    for name, value in variables.items():
        line = f"{name}={value}".replace("\\", r"\\")
        filled, number = re.subn(rf"^{name}=.*$", line, filled, count=1, flags=re.MULTILINE)
        if not number:
            raise UserError(f"--script has no line {name}=..., which is to be filled in; put one where the script's is")
    return filled


def _option(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")


def _gpus(given: str | None) -> int | None:
    """The number in ``8`` or ``a100:8``."""
    if given is None:
        return None
    number = given.rpartition(":")[2]
    if not number.isdigit():
        raise UserError(f"--gpus-per-node {given} must be a number, or TYPE:NUMBER")
    return int(number)


def _read_script(own: Path | None) -> str:
    path = own or next((folder / SCRIPT for folder in SCRIPT_FOLDERS if (folder / SCRIPT).is_file()), None)
    if path is None:
        raise UserError(f"{SCRIPT} is not where finch is installed; give --script FILE")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--script {path} cannot be read: {error.strerror}") from error


def _check(config: str, overrides: list[str], ranks: int | None) -> tuple[str, Path]:
    """What a run finds wrong in its first second, now. Its files may lie elsewhere: they are not looked for.

    Returns:
        The recipe that the model asks for, and the run's folder.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # components of the user's own, as `tune run` finds them
    from finch.checks import check_output_folder, check_schedule
    from finch.config import read, recipe_for
    from finch.options import RECIPES
    from finch.parallel import MeshSizes
    from finch.precision import precision_of

    recipe = recipe_for(config, overrides)
    cfg = read(["--config", config, "resume_from_checkpoint=auto", *overrides], RECIPES[recipe])
    precision_of(cfg.dtype)
    check_schedule(cfg)
    check_output_folder(cfg)
    if ranks is not None:
        MeshSizes(cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim).over(ranks)
    return recipe, Path(os.path.abspath(cfg.output_dir))


def _sbatch(script: str) -> str:
    """The id of the submitted job."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(
            "sbatch is not on this machine's PATH; submit from a login node, or take the script that --dry-run prints"
        ) from error
    if done.returncode != 0:
        told = " ".join(done.stderr.removeprefix("sbatch: error: ").split())
        raise UserError(f"sbatch refuses: {told}")
    return done.stdout.strip().partition(";")[0]
