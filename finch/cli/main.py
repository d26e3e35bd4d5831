"""The `finch` command. Imports torch only where a subcommand needs it, so that `finch --help` answers at once."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from finch import __version__
from finch.cli.slurm import add_arguments as add_submit_arguments
from finch.cli.slurm import submit as submit_to_slurm
from finch.errors import UserError, report_user_errors
from finch.extras import require_extras


@report_user_errors
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="finch", description="Forgetting-aware fine-tuning for the PyTorch-native stack."
    )
    parser.add_argument("--version", action="version", version=f"finch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    configs = commands.add_parser("configs", help="list, show and copy the configs that --config finds by name")
    actions = configs.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="names, with a line each (the default)")
    show = actions.add_parser("show", help="print a config with its references resolved and the defaults filled in")
    show.add_argument("name")
    show.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`, ~key included")
    copy = actions.add_parser("cp", help="copy a config to a file of your own")
    copy.add_argument("name")
    copy.add_argument("file", type=Path)

    commands.add_parser("methods", help="the names that method= takes, with a line each")

    commands.add_parser("doctor", help="what is installed here, what the machine has, what does not fit together")

    wise_ft = commands.add_parser("wise-ft", help="a model between the pretrained and the tuned one")
    wise_ft.add_argument("--base", type=Path, required=True, metavar="DIR", help="the pretrained model's folder")
    wise_ft.add_argument("--tuned", type=Path, required=True, metavar="DIR", help="the tuned model's folder")
    wise_ft.add_argument(
        "--alpha", type=float, nargs="+", default=[0.5], help="the tuned model's share, or several (default: 0.5)"
    )
    wise_ft.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets a folder alpha_A for each alpha")

    slurm = commands.add_parser("slurm", help="runs as jobs of Slurm")
    jobs = slurm.add_subparsers(dest="action", metavar="ACTION", required=True)
    submit = jobs.add_parser(
        "submit",
        help="check a run and submit it with sbatch",
        usage="finch slurm submit CONFIG [--nodes N] [--gpus-per-node N] [option of sbatch ...] [key=value ...]",
        allow_abbrev=False,
    )
    add_submit_arguments(submit)

    chosen, rest = parser.parse_known_args(arguments)
    if rest and chosen.command != "slurm":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if chosen.command == "configs":
        run = {"show": show_config, "cp": copy_config}.get(chosen.action, list_configs)
        run(chosen)
    elif chosen.command == "methods":
        list_methods()
    elif chosen.command == "doctor":
        from finch.cli import doctor

        sys.exit(1 if doctor.main() else 0)
    elif chosen.command == "slurm":
        require_extras("finch slurm submit", "torchtune")
        submit_to_slurm(chosen, rest)
    elif chosen.command == "wise-ft":
        require_extras("finch wise-ft", "torchtune")
        from finch.weights.wise_ft import wise_ft as interpolate

        for folder in interpolate(chosen.base, chosen.tuned, chosen.alpha, chosen.out):
            print(folder)
    else:
        parser.print_help()
        sys.exit(2)


def list_configs(_: argparse.Namespace) -> None:
    """Each config's name and the first line of its header."""
    from finch.config.registry import config_names

    names = config_names()
    for name, path in names.items():
        header = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        print(f"{name:<{max(map(len, names))}}  {header}")


def list_methods() -> None:
    """Each method's name and what it does."""
    from finch.config.methods import METHODS

    for name, method in METHODS.items():
        print(f"{name:<{max(map(len, METHODS))}}  {method.summary}")


def show_config(chosen: argparse.Namespace) -> None:
    """The config as a run would see it; a key left open shows as <key>."""
    require_extras("finch configs show", "torchtune")
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from finch.config.parser import merge, recipe_of
    from finch.config.registry import find_config
    from finch.config.schema import RECIPES, REQUIRED
    from finch.config.validation import check, drop_null_blocks

    try:
        file = DictConfig(OmegaConf.load(find_config(chosen.name)))
        cfg, changed = file, bool(chosen.overrides) or "method" in file
        if changed:  # by torchtune's own reading of key=value and ~key, which takes seconds to import
            in_file: Any = OmegaConf.to_container(file)
            cfg, _ = merge(in_file, chosen.overrides)
            drop_null_blocks(cfg)
        options = RECIPES[recipe_of(cfg)]
        for key, option in options.items():
            if option.default is not REQUIRED and key not in cfg:
                cfg[key] = option.default
        for key in [str(key) for key in cfg if OmegaConf.is_missing(cfg, key)]:
            cfg[key] = f"<{key}>"  # what refers to it shows the gap
        if changed:
            check(cfg, options, own_keys=file)
        print(OmegaConf.to_yaml(cfg, resolve=True), end="")
    except UserError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{chosen.name}: {str(error).splitlines()[0]}; overrides are key=value") from error


def copy_config(chosen: argparse.Namespace) -> None:
    """Never overwrites."""
    from finch.config.registry import find_config

    source = find_config(chosen.name)
    if chosen.file.exists():
        raise UserError(f"{chosen.file} exists; give another name")
    try:
        chosen.file.parent.mkdir(parents=True, exist_ok=True)
        chosen.file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{chosen.file} cannot be written ({error.strerror}); give another place") from error
    open_keys = re.findall(r"^(\w+): \?\?\?", source.read_text(encoding="utf-8"), re.MULTILINE)
    given = "".join(f" {key}=..." for key in open_keys)
    print(f"copied to {chosen.file}; start it with: tune run finch_full_finetune --config {chosen.file}{given}")


if __name__ == "__main__":
    main()
