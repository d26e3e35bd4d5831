"""Writes docs/compatibility.md: which of torchtune's full fine-tuning configs run on finch, and which are refused.

Each config goes through the checks that a run makes before it opens files. Its model is built on the meta device, to see
whether it is a text decoder.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from finch.base.errors import UserError
from finch.config.instantiate import build, component_of
from finch.config.parser import read
from finch.config.schema import UNSUPPORTED_KEYS, FullFinetuneKeys
from finch.distributed.tensor_parallel import check_plan
from finch.models.families import replace_known_bad_builder
from finch.training.config_checks import check_combinations, check_schedule, check_text_decoder

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
RECIPES = {"full_finetune_single_device": "single device", "full_finetune_distributed": "distributed"}
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def torchtune_configs() -> list[tuple[str, str]]:
    """(recipe, config) of each config that torchtune's registry has for the two full fine-tuning recipes."""
    return [
        (recipe.name, config.name)
        for recipe in get_all_recipes()
        if recipe.name in RECIPES
        for config in recipe.configs
    ]


def error_of(name: str) -> str | None:
    """Why finch refuses a config; None if it runs."""
    try:
        cfg = read(["--config", str(CONFIGS / f"{name}.yaml")], FullFinetuneKeys)
        check_schedule(cfg)
        check_combinations(cfg, torch.device("cuda"))
        with torch.device("meta"):
            decoder = build(replace_known_bad_builder(cfg.model)[0], "model")
        check_text_decoder(decoder, component_of(cfg.model) or "")
        if cfg.tensor_parallel_plan is not None:
            check_plan(decoder, build(cfg.tensor_parallel_plan, "tensor_parallel_plan"), 2)
    except UserError as error:
        return str(error)
    return None


def remarks(name: str) -> str:
    cfg = OmegaConf.load(CONFIGS / f"{name}.yaml")
    conditions = {
        "needs `bitsandbytes`": "bitsandbytes" in cfg.optimizer["_component_"],
        "optimizer in the backward": cfg.get("optimizer_in_bwd"),
        "tensor-parallel plan": cfg.get("tensor_parallel_plan"),
        "CPU offload": cfg.get("fsdp_cpu_offload"),
        "Meta's checkpoint format": "Meta" in cfg.checkpointer["_component_"],
        "finch's builder replaces torchtune's": replace_known_bad_builder(cfg.model)[1] is not None,
    }
    return ", ".join(remark for remark, is_true in conditions.items() if is_true)


def page() -> str:
    rows, refused = [], []
    for recipe, name in torchtune_configs():
        error = error_of(name)
        if error is None:
            rows.append(f"| `{name}` | {RECIPES[recipe]} | runs | {remarks(name)} |")
        else:
            rows.append(f"| `{name}` | {RECIPES[recipe]} | refused | |")
            refused.append(f"- `{name}`: {error}")
    keys = [
        f"| `{key}` | {'null' if unsupported.no_op_value is None else unsupported.no_op_value} | {unsupported.remedy} |"
        for key, unsupported in UNSUPPORTED_KEYS.items()
    ]
    return TEMPLATE.format(
        version=torchtune.__version__.split("+")[0],
        runs=len(rows) - len(refused),
        all=len(rows),
        rows="\n".join(rows),
        refused="\n".join(refused),
        keys="\n".join(keys),
    )


TEMPLATE = """# torchtune's configs on finch

Written by `python .ci/pages/compatibility.py` for torchtune {version}; a test compares. {runs} of {all} configs of the two full
fine-tuning recipes pass every check unchanged. Start one by its path, or copy it with `tune cp`:

```bash
tune cp llama3_1/8B_full my.yaml
finch run --nproc_per_node 8 my.yaml
```

This is plain fine-tuning with a constant learning rate or torchtune's schedule; `method=finch` makes it FINCH.

| config | recipe | | |
|---|---|---|---|
{rows}

torchtune 0.6.1's builders of Gemma 2 and Phi-4 differ from the published checkpoints (`finch/models/gemma2.py` and
`finch/models/phi4.py` describe how). A config that names them runs with finch's builders of the same names and logs that
at the start; its losses then differ from the stock recipe's. Mistral 0.1 and Phi-3-mini limit attention to a window, which
torchtune's models do not: rows longer than the window are trained with more context, and a warning is logged.

## Refused

finch trains text decoders:

{refused}

## Keys of torchtune's recipes that are refused

A config may name them with the value in the second column. `finch list keys` lists all other keys.

| key | accepted | otherwise |
|---|---|---|
{keys}
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
