"""`finch run --slurm`: checks a run's config, then submits its sbatch script with the run's arguments.

The script itself stays as it is: sbatch's command line has precedence over ``#SBATCH`` lines, and the script takes its
settings from environment variables.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finch.base import hub
from finch.base.errors import UsageError, UserError, writing
from finch.cli.early_checks import config_checks, read_job

SCRIPT = "finch_full_finetune.sbatch"
SCRIPT_FOLDERS = [
    Path(__file__).parents[1] / "slurm_scripts",  # in an installed wheel
    Path(__file__).parents[2] / "slurm",  # in a checkout
]
_ONE_RANK_PER_GPU = "RANKS_PER_NODE=${FINCH_RANKS_PER_NODE:-}"  # the script's line, unless a site has changed it
_LONG_NAMES = {"N": "nodes", "t": "time", "o": "output", "G": "gpus"}  # of the options that are read here
# sbatch's options that take no value, or take it after = only.
_FLAG = re.compile(
    "--(exclusive|contiguous|hold|ignore-pbs|no-kill|(no-)?requeue|overcommit|oversubscribe|propagate|get-user-env|parsable|quiet|reboot|"
    "spread-job|test-only|use-min-nodes|verbose|wait|nice)|-[XHkOsQvW]"
)
_TORCHRUN = re.compile(
    "--(nproc-per-node|nnodes|node-rank|rdzv-[a-z-]+|(max-)?restarts|standalone|master-(addr|port)|log-dir)"
)
_MIN_TRAINING_S = 60  # a job needs longer before the warning of its time limit, or it never makes progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command itself. CONFIG, overrides and sbatch's options are what the parser leaves over."""
    parser.usage = "finch run --slurm CONFIG [--nodes N] [--gpus-per-node N] [option of sbatch ...] [key=value ...]"
    parser.epilog = (
        "CONFIG is a path or a name of `finch list configs`; key=value and ~key change it, as for `finch run`. All other options are "
        "sbatch's and are passed on unchanged: --nodes, --gpus-per-node (default: 1; 0: train on CPU), --time, --partition, ... "
        "A value with = in it needs the form --option=value. The script's settings are environment variables, such as "
        "FINCH_CONTAINER; its first lines list them."
    )
    parser.add_argument("--config", metavar="CONFIG", help="also the first word")
    add_script(parser)


def add_script(parser: argparse.ArgumentParser) -> None:
    """The options of all jobs."""
    parser.add_argument("--script", metavar="FILE", help="your own copy of the script")
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch command and submit nothing")


def main(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Submits the job and prints its id and the commands to follow it; with ``--dry-run``, prints the sbatch command.

    Args:
        args: as parsed by ``add_arguments``.
        rest: CONFIG, overrides (``key=value``, ``~key``) and sbatch's options, in any order.

    Raises:
        UserError: a mistake in the config or the options; no Slurm on this machine; sbatch fails.
    """
    refuse_torchrun(rest)
    given, words = split_options(rest)
    words = [args.config, *words] if args.config else words
    if not words:
        raise UsageError("CONFIG is missing: finch run --slurm CONFIG [option of sbatch ...] [key=value ...]")
    # As paths, which a requeued job finds unchanged.
    config, overrides = absolute(words[0]), hub.local_paths({}, words[1:])[1]
    script, text = read_script(SCRIPT, args.script)
    job = complete_options(given, text, is_own_script=bool(args.script))
    if "array" in job.by_name:
        raise UserError(
            f"--array={job.by_name['array']} starts all of its tasks on one output_dir; submit each run by itself, or several with finch sweep --slurm"
        )
    # Only the checks that need none of the run's files, which may be on another machine.
    job.settings["FINCH_RECIPE"], cfg = read_job(config, ["resume_from_checkpoint=auto", *overrides], is_here=False)
    for check in config_checks(cfg, job.num_ranks):
        check()
    # The script reads no config: it takes the folder from the command line, wherever the job starts.
    run = Path(os.path.abspath(cfg.output_dir))
    overrides = [f"output_dir={run}", *(word for word in overrides if not word.startswith("output_dir="))]
    end = "saves and ends the job; the same command resumes the run"
    submit(job, script, [config, *overrides], run, "output_dir=", end, is_dry_run=args.dry_run)


@dataclass(frozen=True)
class JobOptions:
    """What a job of the script is submitted with.

    Attributes:
        given: sbatch's options, defaults added.
        by_name: the options by their long names, those of the script's ``#SBATCH`` lines included.
        settings: the script's environment variables.
        ranks_per_node, num_ranks: None: only Slurm or the site's script knows.
    """

    given: list[str]
    by_name: dict[str, str]
    settings: dict[str, str]
    ranks_per_node: int | None
    num_ranks: int | None


def complete_options(given: Sequence[str], text: str, *, is_own_script: bool = False) -> JobOptions:
    """Adds the defaults to sbatch's options, and checks them.

    Args:
        text: the content of the script.
        is_own_script: whether the script is the user's, and names its own Python.

    Raises:
        UserError: a time limit that is too short, an environment that is hidden from the script, or a wrong setting.
    """
    given = ["--export=ALL", *given]  # a site's SBATCH_EXPORT may say otherwise
    options = {**_header(text), **options_of(given)}
    if not any(name.startswith("gpus") or name == "gres" for name in options):
        given.append("--gpus-per-node=1")
        options["gpus-per-node"] = "1"
    _check_time(options)
    if not is_own_script and not re.match(r"R?B:(SIG)?(USR1|10)\b", options.get("signal", ""), flags=re.IGNORECASE):
        raise UserError(
            f"--signal={options.get('signal')} would not save the run before the time limit; give --signal=B:USR1@SECONDS"
        )
    if options["export"].split(",")[0] != "ALL":
        raise UserError(f"--export={options['export']} hides settings from the script; give --export=ALL,NAME=VALUE")
    # Read off the script, which a site may have changed.
    names = re.findall(r"\$\{(FINCH_\w+):-", text)
    settings = {name: os.environ[name] for name in names if os.environ.get(name)}
    # A container has its own Python, and a script of the user's names one.
    if not is_own_script and "FINCH_CONTAINER" not in settings:
        settings.setdefault("FINCH_PYTHON", sys.executable)
    if setup := settings.get("FINCH_SETUP"):
        if not Path(setup).is_file():
            raise UserError(f"FINCH_SETUP={setup} is not a file; give one that is")
        settings["FINCH_SETUP"] = os.path.abspath(setup)
    nodes = _number(options.get("nodes", "1"))
    ranks = _ranks_per_node(settings, options, text)
    return JobOptions(given, options, settings, ranks, nodes * ranks if nodes and ranks else None)


def refuse_torchrun(words: Iterable[str]) -> None:
    """Raises UserError at an option of torchrun, which the script starts: sbatch would be given it."""
    names = (word.partition("=")[0] for word in words)
    if wrong := next((name for name in names if _TORCHRUN.fullmatch(name.replace("_", "-"))), None):
        raise UserError(
            f"{wrong} is torchrun's; ranks are --gpus-per-node N and --nodes N, on CPUs the variable FINCH_RANKS_PER_NODE"
        )


def read_script(name: str, own: str | None = None) -> tuple[Path, str]:
    """The path and the text of a script of finch, or of the user's own copy.

    Raises:
        UserError: there is no such file, or it is not text.
    """
    candidates = [Path(own)] if own else [folder / name for folder in SCRIPT_FOLDERS]
    script = next((path for path in candidates if path.is_file()), None)
    if script is None:
        raise UserError(f"{own or name} is not a file; give --script FILE")
    try:
        return script, script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--script {script} cannot be read ({error}); give a shell script") from error


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """sbatch's options with their values, and the other words. A value may be a separate word if it has no ``=``, of an option that takes one."""
    options: list[str] = []
    others: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        has_value = previous[:2] != "--" and len(previous) > 2  # -N2
        takes_one = previous.startswith("-") and not (has_value or _FLAG.fullmatch(previous))
        is_value = takes_one and "=" not in previous + word and not word.startswith("~")
        (options if word.startswith("-") or is_value else others).append(word)
    return options, others


def options_of(words: Iterable[str]) -> dict[str, str]:
    """sbatch's options by their long names; the last one counts, a flag's value is empty."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word.startswith("-"):
            name, value = _LONG_NAMES.get(word[1:2], word[1:2]), word[2:]
        else:
            value = word
        options[name] = value
    return options


def seconds_of(limit: str) -> int | None:
    """Slurm's time limits: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None: no limit, or none of these."""
    # The hours are lazy (??): of 10:30 the first number is minutes.
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?|(?:(\d+):)??(\d+))(?::(\d+))?", limit)
    if match is None:
        return None
    days, day_hours, day_minutes, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    # A limit of 0 is Slurm's way to ask for none.
    return (days * 24 + day_hours + hours) * 3600 + (day_minutes + minutes) * 60 + seconds or None


def _check_time(options: Mapping[str, str]) -> None:
    """Fails where the warning of the time limit would come right at each start of the job."""
    limit = seconds_of(options.get("time", ""))
    signal = re.search(r"@(\d+)", options.get("signal", ""))
    warning = int(signal[1]) if signal else 60  # Slurm's default
    if limit is not None and limit < warning + _MIN_TRAINING_S:
        raise UserError(
            f"--time {options['time']} must be at least {_MIN_TRAINING_S} s longer than the {warning} s of its warning; "
            "give a longer --time, or a shorter warning by --signal=B:USR1@SECONDS"
        )


def _header(script: str) -> dict[str, str]:
    """The options in a script's #SBATCH lines."""
    lines = re.findall(r"^#SBATCH\s(.*)", script, flags=re.MULTILINE)
    try:
        return options_of(shlex.split("\n".join(lines), comments=True))
    except ValueError as error:
        raise UserError(f"--script: an #SBATCH line cannot be read: {error}") from error


def _number(text: str) -> int | None:
    """The number in a text; None where only Slurm knows it: ``2-4``."""
    return int(text) if text.isdigit() else None


def _ranks_per_node(settings: Mapping[str, str], options: Mapping[str, str], script: str) -> int | None:
    """The ranks of each node; None: only Slurm or the site's script knows."""
    if given := settings.get("FINCH_RANKS_PER_NODE"):
        if not re.fullmatch(r"[1-9]\d*", given):
            raise UserError(f"FINCH_RANKS_PER_NODE={given} must be a number of at least 1")
        return int(given)
    if _ONE_RANK_PER_GPU not in script or "gpus-per-node" not in options:
        return None
    gpus = _number(options["gpus-per-node"].rpartition(":")[2])  # 8 or a100:8
    return 1 if gpus == 0 else gpus


def absolute(config: str) -> str:
    """A config's path where it is a file; its name as it is."""
    return os.path.abspath(config) if Path(config).is_file() else config


def submit(
    job: JobOptions, script: Path, words: Sequence[str], run: Path, folder_key: str, end: str, *, is_dry_run: bool
) -> None:
    """Submits a job, or prints the command; messages say that ``folder_key`` sets the run's folder, and that scancel does ``end``."""
    log = job.by_name.get("output", f"{run}/slurm/%j.out")
    command = ["sbatch", "--parsable", *job.given, f"--output={log}", str(script), *words]
    folders, place = {f"{folder_key}{run}": run / "slurm"}, Path(log).parent
    if place != Path() and "%" not in str(place) and "chdir" not in job.by_name:  # else only Slurm knows it
        folders[f"--output={log}"] = place
    if is_dry_run:
        made = shlex.join(dict.fromkeys(map(str, folders.values())))
        print(f"mkdir -p {made} && {as_shell(command, job.settings)}")
        return
    # sbatch makes no folder, and a job that cannot write its --output ends without a word.
    for key, folder in folders.items():
        with writing(key):
            folder.mkdir(parents=True, exist_ok=True)
    number = run_sbatch(command, job.settings)
    ranks = job.ranks_per_node or "as the job has GPUs"
    nodes = job.by_name.get("nodes", 1)
    print(f"job {number}: nodes={nodes}, ranks per node={ranks}, {folder_key.strip('- =')}={run}")
    print(f"  squeue --jobs {number}")
    print(f"  tail -F {shlex.quote(log.replace('%j', number))}")
    print(f"  scancel {number}    # {end}")


def as_shell(command: Sequence[str], settings: Mapping[str, str]) -> str:
    """A command after its environment variables, to be pasted."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(command)])


def run_sbatch(command: Sequence[str], settings: Mapping[str, str]) -> str:
    """Submits a job and returns its id.

    Raises:
        UserError: sbatch is missing or fails.
    """
    try:
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(
            "sbatch is not on this machine's PATH; give the same command on a login node, or without --slurm here"
        ) from error
    if done.returncode != 0:
        message = " ".join(done.stderr.removeprefix("sbatch: error: ").split())
        raise UserError(f"sbatch fails: {message}")
    # With --parsable the name of a cluster may follow the id.
    return done.stdout.strip().partition(";")[0]
