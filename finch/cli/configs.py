"""`finch configs`: the configs and grids that come with finch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from finch.base.errors import UsageError, UserError
from finch.base.extras import require_extras
from finch.config.instantiate import config_names, find_config, grid_names, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="list the names with a description (the default)")
    show = actions.add_parser("show", help="print a config, references resolved and defaults filled in")
    show.add_argument("name", help="as finch configs lists it, or a file")
    show.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for `finch run`, ~key included")
    copy = actions.add_parser("cp", help="copy a config to a file")
    copy.add_argument("name", help="as finch configs lists it, or a file")
    copy.add_argument("file", type=Path)
    for action in (show, copy):  # shells complete it
        name: Any = next(each for each in action._actions if each.dest == "name")
        name.completer = lambda **_: [*config_names(), *grid_names()]


def main(parsed: argparse.Namespace) -> None:
    """Shows or copies a config, or lists all."""
    {"show": show_config, "cp": copy_config}.get(parsed.action, list_configs)(parsed)


def list_configs(_: argparse.Namespace) -> None:
    """Prints each config's name and what it is, then those of the grids for `finch sweep`."""
    names = {**config_names(), **grid_names()}
    for name, path in names.items():
        header = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("#").strip()  # below the schema's path
        print(f"{name:<{max(map(len, names))}}  {header}")


def show_config(parsed: argparse.Namespace) -> None:
    """Prints the config as a run would see it; a missing value as ``<key>``."""
    require_extras("finch configs show", "torchtune")
    from omegaconf import OmegaConf

    from finch.config.parser import complete, merge, named_errors, readable, recipe_of
    from finch.config.schema import RECIPES
    from finch.config.validation import check, drop_null_blocks, fill_in

    if parsed.name in grid_names():
        if parsed.overrides:
            raise UsageError(
                f"{parsed.name} is a grid, shown as it is; finch sweep {parsed.name} --dry-run {' '.join(parsed.overrides)} lists its cells"
            )
        print(grid_names()[parsed.name].read_text(encoding="utf-8"), end="")
        return
    path, overrides = find_config(parsed.name), readable(parsed.overrides)
    with named_errors(path):
        file_cfg = load_config(path)
        cfg, is_changed = file_cfg, bool(overrides) or "method" in file_cfg
        if is_changed:  # only then, since torchtune's parser takes seconds to import
            file_blocks: Any = OmegaConf.to_container(file_cfg)
            cfg, _ = merge(complete(file_blocks, overrides)[0], overrides)
            drop_null_blocks(cfg)
        for key in [str(key) for key in cfg if OmegaConf.is_missing(cfg, key)]:
            # A value that is missing cannot be resolved where other keys refer to it.
            cfg[key] = f"<{key}>"
        model = RECIPES[recipe_of(cfg)]
        fill_in(cfg, model)
        if is_changed:
            check(cfg, model, user_keys=file_cfg)
        print(OmegaConf.to_yaml(cfg, resolve=True), end="")


def copy_config(parsed: argparse.Namespace) -> None:
    """Copies a config or a grid to a new file."""
    is_grid = parsed.name in grid_names()
    source = grid_names()[parsed.name] if is_grid else find_config(parsed.name)
    text = source.read_text(encoding="utf-8")
    schema = Path(__file__).parents[1] / "config" / f"{'grid' if is_grid else 'finch'}.schema.json"
    # In the packaged file this path is relative, and would lead nowhere from the copy's folder.
    text = re.sub(r"^(# yaml-language-server: \$schema=).*", rf"\g<1>{schema}", text)
    if parsed.file.exists():
        raise UserError(f"{parsed.file} exists; give another name")
    try:
        parsed.file.parent.mkdir(parents=True, exist_ok=True)
        parsed.file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{parsed.file} cannot be written ({error.strerror}); give another path") from error
    missing_keys = re.findall(r"^(\w+): \?\?\?", text, re.MULTILINE)
    overrides = "".join(f" {key}=..." for key in missing_keys)
    start = "finch sweep" if is_grid else "finch run --config"
    print(f"copied to {parsed.file}; start it with: {start} {parsed.file}{overrides}")
