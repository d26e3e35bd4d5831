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

from finch.cli.sbatch import fill_in, options_of, seconds_of, value_of
from finch.errors import UserError

SCRIPT_FOLDERS = [
    Path(__file__).parents[1] / "slurm_scripts",  # in an installed wheel
    Path(__file__).parents[2] / "slurm",  # in a checkout
]
SCRIPT = "finch_full_finetune.sbatch"
# sbatch's options that may stand apart from their value; the others are handed on as --option=value.
_KNOWN_OPTIONS = ("time", "partition", "account", "qos", "job-name", "cpus-per-task", "mem", "constraint", "output")
_OTHER_WAYS_TO_GPUS = ("gpus", "gres", "gpus-per-task", "gpus-per-socket")
# What a start takes before its first step; a time limit that leaves less than this before its warning brings a run nowhere.
_TIME_TO_BEGIN_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``submit``. Overrides and sbatch's other options are what the parser leaves over."""
    parser.epilog = (
        f"sbatch's {', '.join('--' + name for name in _KNOWN_OPTIONS)} take their value after a space or =; any other option of "
        "sbatch's is handed on as --option=value. key=value and ~key change the config, as for `tune run`."
    )
    parser.add_argument("config", metavar="CONFIG", help="a path, or a name of `finch configs`")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: the script's, 1")
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="default: the script's, 1; 0: ranks on the CPU")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: the script's, one a GPU")
    for name in _KNOWN_OPTIONS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)  # the epilog has them
    parser.add_argument("--container", metavar="IMAGE", help="run in this image")
    parser.add_argument("--container-runtime", choices=["pyxis", "apptainer"], help="default: the script's, pyxis")
    parser.add_argument(
        "--container-mounts",
        metavar="DIR,FROM:TO",
        help="besides the working directory and output_dir; DIR: the same path inside",
    )
    parser.add_argument("--setup", type=Path, metavar="FILE", help="a shell file to source first: modules, variables")
    parser.add_argument(
        "--python", metavar="PROGRAM", help="default: the script's, else this one; with a container: python"
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="your own copy of the script")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")


@dataclass(frozen=True)
class Submission:
    """What is to be submitted.

    Attributes:
        script: the whole script.
        output_dir: the run's folder, absolute.
        ranks: how many in all, in words.
        output: where sbatch writes, in its own pattern (``%j``: the job's id).
    """

    script: str
    output_dir: Path
    ranks: str
    output: str


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
    print(f"job {job}: {submission.ranks}, output_dir={submission.output_dir}")
    print(f"  squeue --jobs {job}")
    print(f"  tail -F {submission.output.replace('%j', job)}")
    print(f"  scancel {job}    # saves and ends it; the same command goes on from there")


def prepare(chosen: argparse.Namespace, rest: Sequence[str]) -> Submission:
    """The script for a run that has been checked as far as that goes without its data and weights.

    Args:
        chosen: what ``add_arguments`` has parsed.
        rest: overrides (``key=value``, ``~key``) and further options of sbatch (``--option=value``).

    Raises:
        UserError: see ``finch.config.parser.read``; also a script without the lines to fill in.
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
    if chosen.nodes is not None:
        header["nodes"] = str(chosen.nodes)
    gpus = _gpus(chosen.gpus_per_node)
    if gpus == 0 or (gpus is None and any(name in header for name in _OTHER_WAYS_TO_GPUS)):
        header["gpus-per-node"] = None
    elif gpus is not None:
        header["gpus-per-node"] = chosen.gpus_per_node
    for name, number in (("nodes", chosen.nodes), ("ranks-per-node", chosen.ranks_per_node)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} starts nothing; give at least 1")
    if chosen.setup is not None and not chosen.setup.is_file():
        raise UserError(f"--setup {chosen.setup} is no file here; give one that is")

    template = _read_script(chosen.script)
    options = {name: value for name, value in {**options_of(template), **header}.items() if value is not None}
    _check_time(options)
    nodes = _number(options.get("nodes", "1"))
    ranks = chosen.ranks_per_node or _ranks_per_node(template, options)
    config = os.path.abspath(chosen.config) if Path(chosen.config).is_file() else chosen.config
    recipe, output_dir = _check(config, overrides, None if nodes is None or ranks is None else nodes * ranks)

    if not options.get("output"):
        options["output"] = header["output"] = f"{output_dir}/slurm/%j.out"
    overrides = [word for word in overrides if not word.startswith("output_dir=")]
    words = [config, f"output_dir={output_dir}", *overrides]
    filled = {
        **_variables(template, chosen, recipe, output_dir),
        "ARGUMENTS": "(\n" + "".join(f"  {shlex.quote(word)}\n" for word in words) + ")",
    }
    each = "a rank a GPU" if ranks is None else f"{ranks} rank{'s' if ranks > 1 else ''}"
    return Submission(
        fill_in(template, header, filled),
        output_dir,
        f"{options.get('nodes', '1')} node{'' if nodes == 1 else 's'} with {each}",
        options["output"],
    )


def _variables(template: str, chosen: argparse.Namespace, recipe: str, output_dir: Path) -> dict[str, str]:
    """The shell variables to set, quoted: what the command gives. What the script has by itself is the site's, and stays."""
    from finch.config.schema import RECIPES

    given = {
        "PYTHON": chosen.python,
        "RANKS_PER_NODE": None if chosen.ranks_per_node is None else str(chosen.ranks_per_node),
        "SETUP": None if chosen.setup is None else os.path.abspath(chosen.setup),
        "CONTAINER": chosen.container,
        "CONTAINER_RUNTIME": chosen.container_runtime,
    }
    if value_of(template, "RECIPE") in RECIPES:
        given["RECIPE"] = recipe
    has_container = chosen.container or value_of(template, "CONTAINER")
    if not has_container and value_of(template, "PYTHON") == "python":
        given["PYTHON"] = chosen.python or sys.executable
    filled = {name: shlex.quote(value) for name, value in given.items() if value}
    if has_container:
        mounts = value_of(template, "CONTAINER_MOUNTS", quoted=True)  # a variable in it is the script's to expand
        if chosen.container_mounts is not None:
            mounts = ",".join(shlex.quote(folder) for folder in chosen.container_mounts.split(","))
        every = [shlex.quote(os.getcwd()), shlex.quote(str(output_dir)), *mounts.split(",")]
        filled["CONTAINER_MOUNTS"] = ",".join(dict.fromkeys(filter(None, every)))
    return filled


def _number(text: str) -> int | None:
    """None where only Slurm, or the shell, knows: ``2-4``, ``$N``."""
    return int(text) if text.isdigit() else None


def _ranks_per_node(script: str, options: Mapping[str, str]) -> int | None:
    """One rank a GPU, unless the script has another number."""
    own = value_of(script, "RANKS_PER_NODE")
    if own:
        return _number(own)
    if "gpus-per-node" in options:
        gpus = _number(options["gpus-per-node"].rpartition(":")[2])
        return 1 if gpus == 0 else gpus
    return None if any(name in options for name in _OTHER_WAYS_TO_GPUS) else 1


def _check_time(options: Mapping[str, str]) -> None:
    """A warning that comes at once makes every start a short one.

    Raises:
        UserError: the time limit does not outlast the warning before it.
    """
    limit = seconds_of(options.get("time", ""))
    signal = re.fullmatch(r"(?:[RB]{1,2}:)?\w+(?:@(\d+))?", options.get("signal", "@"))
    if limit is None or signal is None:
        return  # none, or for sbatch to refuse
    warning = int(signal[1] or 60)
    if limit < warning + _TIME_TO_BEGIN_S:
        raise UserError(
            f"--time {options['time']} is not a minute longer than the {warning} s of its warning, --signal={options['signal']}, "
            "so that no start would get far; give a longer --time or a shorter warning"
        )


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
    from finch.config.parser import read, recipe_for
    from finch.config.schema import RECIPES
    from finch.distributed.parallel import MeshSizes
    from finch.distributed.precision import precision_of
    from finch.training.config_checks import check_output_folder, check_schedule

    recipe = recipe_for(config, overrides)
    cfg = read(["--config", config, "resume_from_checkpoint=auto", *overrides], RECIPES[recipe])
    precision_of(cfg.dtype)
    check_schedule(cfg)
    check_output_folder(cfg)
    if ranks is not None:
        MeshSizes(cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim, cfg.tensor_parallel_dim).resolve(ranks)
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
