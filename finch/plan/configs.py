"""What `finch list` shows and copies: the configs and grids that come with finch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finch.base import hub
from finch.base.errors import UsageError, UserError, writing
from finch.base.extras import require_extras
from finch.config.instantiate import find_config, grid_names, load_config


def show_config(name: str, *words: str) -> None:
    """Prints a config, changed by ``key=value`` and ``~key``, as a run would see it; a missing value as ``<key>``."""
    require_extras("finch list --show", "torchtune")
    from omegaconf import OmegaConf

    from finch.config.parser import complete, merge, named_errors, readable, recipe_of
    from finch.config.schema import RECIPES
    from finch.config.validation import check, drop_null_blocks, fill_in

    if name in grid_names():
        if words:
            raise UsageError(
                f"{name} is a grid, shown as it is; finch sweep {name} --dry-run {' '.join(words)} lists its cells"
            )
        print(grid_names()[name].read_text(encoding="utf-8"), end="")
        return
    path, overrides = find_config(name), readable(list(words))
    with named_errors(path):
        file_cfg = load_config(path)
        cfg, is_changed = file_cfg, bool(overrides) or "method" in file_cfg
        if is_changed:  # only then, since torchtune's parser takes seconds to import
            file_blocks: Any = OmegaConf.to_container(file_cfg)
            file_blocks, overrides = hub.local_paths(file_blocks, overrides)
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


def copy_config(name: str, target: str | None = None, *others: str) -> None:
    """Copies a config or a grid to a new file, by default of its own name."""
    if others:
        raise UsageError(f"finch list --copy does not take {others[0]}; see finch list --help")
    is_grid = name in grid_names()
    source = grid_names()[name] if is_grid else find_config(name)
    file = Path(target or source.name)
    text = source.read_text(encoding="utf-8")
    schema = Path(__file__).parents[1] / "config" / f"{'grid' if is_grid else 'finch'}.schema.json"
    # In the packaged file this path is relative, and would lead nowhere from the copy's folder.
    text = re.sub(r"^(# yaml-language-server: \$schema=).*", rf"\g<1>{schema}", text)
    if file.exists():
        raise UserError(f"{file} exists; give another name")
    with writing(f"{file}", "give another path"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    missing_keys = re.findall(r"^(\w+): \?\?\?", text, re.MULTILINE)
    overrides = "".join(f" {key}=..." for key in missing_keys)
    print(f"copied to {file}; start it with: finch {'sweep' if is_grid else 'run'} {file}{overrides}")
