"""`finch run`: a recipe, chosen by the config's model, in this process or on several ranks started with torchrun's launcher.

The config is read once: ranks that are started load what was read. A mistake is one line, without the launcher's summary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finch.base import run_files
from finch.base.errors import ERROR_FILE, UsageError, UserError
from finch.base.log import logger
from finch.cli.early_checks import build_model, config_checks, machine_checks, only_errors_logged, read_job
from finch.config.instantiate import find_config
from finch.distributed.processes import share_cores

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE = "finch run [torchrun options] CONFIG [key=value ...] [~key] [method=NAME]"

HELP = f"""usage: {USAGE}

Trains with the recipe for the config's model: finch_full_finetune, or finch_lora_finetune for a model with LoRA layers.

  CONFIG, --config CONFIG   a YAML file, or the name of a config that comes with finch: `finch list configs`
  --nproc_per_node N        ranks on this machine: a number, gpu (one per GPU) or auto (default: 1, in this process)
  --restarts N              starts the ranks again, at most N times, from the last checkpoint where one fails or hangs
  --slurm                   submits the run with sbatch: `finch run --slurm --help`
  --nnodes, --rdzv_...      several machines, and all other options of torchrun: `torchrun --help`
  key=value, ~key           sets or removes a key: `finch list keys`
  method=NAME               trains with a method: `finch list methods`

`finch check` takes the same arguments, checks everything and trains nothing."""


def main(_: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Ends the process with the recipe's exit code, 130 after Ctrl-C.

    Args:
        arguments: as in ``USAGE``; torchrun's options may stand anywhere.

    Raises:
        UserError: a mistake in the arguments, the config or a file.
    """
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return
    config, overrides, options = parse_arguments(arguments, USAGE)
    nodes, local_ranks = number_of_ranks(options)
    given = {} if vars(options).keys() == {"nnodes", "nproc_per_node"} else vars(options)
    changed = {name for name, value in given.items() if value != _launcher_parser().get_default(name)}
    ranks = nodes * local_ranks
    # Any other option of torchrun needs its launcher, also for one rank.
    if ranks == 1 and changed <= {"nproc_per_node"}:
        recipe, cfg = read_job(config, overrides)
        importlib.import_module(recipe).recipe_main(cfg)  # with this process's signals and exit code
        return
    with _logged_at_the_end():
        recipe, cfg = read_job(config, overrides, ranks=ranks)
        with only_errors_logged():  # the ranks log it again
            for check in (*config_checks(cfg, ranks), *machine_checks(recipe, cfg, ranks)):
                check()
            build_model(recipe, cfg)
    sys.exit(_launch(recipe, cfg, options, local_ranks))


@contextlib.contextmanager
def _logged_at_the_end() -> Iterator[None]:
    """Keeps what is logged until the block has ended; after a mistake its line is the only one."""
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
    for record in records:
        logger.handle(record)


def parse_arguments(arguments: Sequence[str], usage: str) -> tuple[str, list[str], argparse.Namespace]:
    """The config, the overrides, and torchrun's options with their defaults.

    Raises:
        UsageError: no config; an option that torchrun does not have.
        UserError: the config does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default=os.environ.get("PET_NPROC_PER_NODE", "1"))
    try:
        parsed, words = parser.parse_known_args(arguments)
        config = parsed.config or take_config(words)
        # Behind an option of torchrun a word may be its value: CONFIG is then sought once torchrun's parser is done.
        if config is None and not any(word.startswith("-") for word in words[:1]):
            raise UsageError(f"CONFIG is missing: {usage}")
        if config is not None:
            find_config(config)  # before torch is imported
        has_options = any(word.startswith("-") for word in words) or "PET_" in " ".join(os.environ)
        options = argparse.Namespace(nproc_per_node=parsed.nproc_per_node)
        if config is not None and not has_options:
            options.nnodes = "1:1"
            return config, words, options  # of torchrun's options none is asked for: torch is not imported yet
        options, words = _launcher_parser().parse_known_args(words, options)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}; `torchrun --help` describes the option") from error
    if config is None and (config := take_config(words)) is None:
        raise UsageError(f"CONFIG is missing: {usage}")
    find_config(config)
    refuse_options(words, "torchrun")
    return config, words, options


def take_config(words: list[str]) -> str | None:
    """Removes the first word if it can only be a config."""
    is_one = words and not words[0].startswith(("-", "~")) and ("=" not in words[0] or Path(words[0]).is_file())
    return words.pop(0) if is_one else None


def refuse_options(words: Sequence[str], whose: str) -> None:
    """Raises UsageError at the first word that looks like an option: how the key is written that is meant."""
    from finch.config.key_search import key_hint
    from finch.config.schema import LoraFinetuneKeys

    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.partition("=")
        if name.startswith("-"):
            key = name.lstrip("-").replace("-", "_")
            # An empty text is in every text: without a following word there is no value.
            if not value and "=" not in following and following[:1] not in "-~":
                value = following
            is_key = key in {"model_dir", "data_files", "method", *LoraFinetuneKeys.model_fields}
            hint = "" if is_key else key_hint(key, LoraFinetuneKeys.model_fields)
            # chr(46) is a dot: before Python 3.12 an f-string inside another has no quotation marks left for a text.
            raise UsageError(f"{name} is no option of {whose}{hint or f'; write {key}={value or chr(46) * 3}'}")


def number_of_ranks(options: argparse.Namespace) -> tuple[int, int]:
    """The (largest) number of nodes, and of ranks on each.

    Raises:
        UserError: torchrun does not understand ``--nnodes`` or ``--nproc_per_node``.
    """
    if options.nnodes in ("1", "1:1") and options.nproc_per_node.isdecimal():
        return 1, int(options.nproc_per_node)
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        return parse_min_max_nnodes(options.nnodes)[1], determine_local_world_size(options.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--nnodes {options.nnodes} --nproc_per_node {options.nproc_per_node}: {error}; give numbers, or --nproc_per_node gpu"
        ) from error


def _launcher_parser() -> argparse.ArgumentParser:
    """torchrun's own options, defaults from its environment variables PET_... included."""
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest not in ("help", "module", "no_python", "run_path"):
            parser._add_action(action)
    # Another name for torchrun's --max-restarts, which keeps its default.
    parser.add_argument("--restarts", dest="max_restarts", type=int, default=argparse.SUPPRESS)
    return parser


def _launch(recipe: str, cfg: DictConfig, options: argparse.Namespace, local_ranks: int) -> int:
    """Starts the ranks, which load ``cfg``, and returns the exit code of the first one that fails. A rank reports a user's mistake itself, in
    FINCH_ERROR_FILE too."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api as launcher
    from torch.distributed.run import run as run_launcher

    from finch.cli.restarts import FinchAgent, failed_rank
    from finch.config.parser import save_for_ranks

    # The program is the interpreter, since torchrun's own call of Python has no -P.
    options = _launcher_parser().parse_args([], options)  # the defaults of those that are not there
    options.module, options.no_python, options.run_path = False, True, False
    options.training_script = SAFE_PYTHON[0]
    # A free port; torchrun's default one is taken where another run has started on this machine.
    if not options.rdzv_endpoint and options.nnodes in ("1", "1:1"):
        options.standalone = True
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup, which torchrun would undo for itself and the ranks
        names = options.signals_to_handle.split(",")
        options.signals_to_handle = ",".join(name for name in names if name != "SIGHUP")
    for name in ("SIGUSR1", "SIGUSR2"):
        if name not in options.signals_to_handle:
            options.signals_to_handle += f",{name}"  # else it would end the launcher, and the ranks with it
    prepare_launcher(local_ranks)
    if options.max_restarts:  # in torchrun's store ranks find addresses of those before: pytorch issue 135712
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="finch_run_") as folder:
        file = save_for_ranks(cfg, Path(folder))
        options.training_script_args = [*SAFE_PYTHON[1:], recipe, "--config", str(file)]
        error_file = Path(os.environ.setdefault(ERROR_FILE, f"{folder}/error"))
        # torchrun has no option for its agent's class.
        launcher.LocalElasticAgent = functools.partial(FinchAgent, run=Path(cfg.output_dir), error_file=error_file)  # type: ignore[assignment, misc]
        try:
            run_launcher(options)
        except ChildFailedError as error:
            return failed_rank(error)[1]
        except SignalException as error:
            # A run that has saved in order to be requeued has ended as it should; one after Ctrl-C has not.
            is_requeued = (Path(cfg.output_dir) / run_files.REQUEUE).exists()
            return 0 if is_requeued and error.sigval != signal.SIGINT else 128 + int(error.sigval)
        except (ValueError, OSError) as error:
            raise UserError(f"torchrun's launcher: {' '.join(str(error).split())}") from error
    return 0


SAFE_PYTHON = (sys.executable, "-P", "-u", "-m")
"""Starts a module; files in the current folder are no modules then, unless a config that the user names finds no other."""


def prepare_launcher(local_ranks: int) -> None:
    """Gives each rank its share of the cores, and silences the launcher's summary: a rank prints its own error."""
    share_cores(os.environ, local_ranks)
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
