"""Writes docs/compatibility.md: what becomes of every full fine-tuning config that torchtune ships, and what is refused.

Each config goes, as shipped, through the checks that a run makes before it opens files; and its model is built without
memory, to see whether it is a text decoder whose checkpoint finch reads.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from finch.config.instantiate import build, component_of
from finch.config.parser import read
from finch.config.schema import FULL_FINETUNE, UNSUPPORTED_KEYS
from finch.distributed.tensor_parallel import build_plan
from finch.errors import UserError
from finch.models.overrides import replace_known_bad_builder
from finch.training.config_checks import check_combinations, check_schedule, check_text_decoder

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
RECIPES = ("full_finetune_single_device", "full_finetune_distributed")
PAGE = Path(__file__).with_suffix(".md")


def shipped() -> list[tuple[str, str]]:
    """(recipe, config) of every config torchtune's registry has for the two full fine-tuning recipes."""
    return [
        (recipe.name, config.name)
        for recipe in get_all_recipes()
        if recipe.name in RECIPES
        for config in recipe.configs
    ]


def outcome(name: str) -> str | None:
    """Why finch refuses a config, or None: it runs."""
    try:
        cfg = read(["--config", str(CONFIGS / f"{name}.yaml")], FULL_FINETUNE)
        check_schedule(cfg)
        check_combinations(cfg, torch.device("cuda"))
        with torch.device("meta"):
            decoder = build(replace_known_bad_builder(cfg.model)[0], "model")
        check_text_decoder(decoder, component_of(cfg.model) or "")
        if cfg.tensor_parallel_plan is not None:
            build_plan(cfg.tensor_parallel_plan, decoder, 2)
    except UserError as error:
        return str(error)
    return None


def remarks(name: str) -> str:
    raw = OmegaConf.load(CONFIGS / f"{name}.yaml")
    said = []
    if "bitsandbytes" in raw.optimizer["_component_"]:
        said.append("needs `bitsandbytes`")
    if raw.get("optimizer_in_bwd"):
        said.append("optimizer in the backward")
    if raw.get("tensor_parallel_plan"):
        said.append("tensor-parallel plan")
    if raw.get("fsdp_cpu_offload"):
        said.append("CPU offload")
    if "Meta" in raw.checkpointer["_component_"]:
        said.append("Meta's checkpoint format")
    if replace_known_bad_builder(raw.model)[1] is not None:
        said.append("finch's builder takes the place of torchtune's")
    return ", ".join(said)


def page() -> str:
    rows, refused = [], []
    for recipe, name in shipped():
        why = outcome(name)
        rows.append(
            f"| `{name}` | {'single device' if 'single' in recipe else 'distributed'} | {'runs' if why is None else 'refused'} | {remarks(name) if why is None else ''} |"
        )
        if why is not None:
            refused.append(f"- `{name}`: {why}")
    runs = sum("| runs |" in row for row in rows)
    keys = [
        f"| `{key}` | {option.harmless if option.harmless is not None else 'null'} | {option.instead} |"
        for key, option in UNSUPPORTED_KEYS.items()
    ]
    return TEMPLATE.format(
        version=torchtune.__version__.split("+")[0],
        runs=runs,
        all=len(rows),
        rows="\n".join(rows),
        refused="\n".join(refused),
        keys="\n".join(keys),
    )


TEMPLATE = """# torchtune's configs on finch

Made by `python docs/compatibility.py` from torchtune {version}; a test keeps it true. {runs} of {all} configs of the two full
fine-tuning recipes pass every check unchanged; start one with its path, or copy it with `tune cp`:

    tune cp llama3_1/8B_full my.yaml
    tune run --nproc_per_node 8 finch_full_finetune --config my.yaml

It is plain fine-tuning with a constant learning rate or torchtune's schedule, until an `lr_scheduler` block makes it FINCH.

| config | recipe | | |
|---|---|---|---|
{rows}

torchtune 0.6.1's builders of Gemma 2 and Phi-4 make another model than the published checkpoints (`finch/models/gemma2`,
`finch/models/phi4.py` say how). A config that names them runs with finch's builders of the same names, and says so when it
starts; its losses are then not the stock recipe's. Mistral 0.1 and Phi-3-mini limit attention to a window, which torchtune's
models do not: rows longer than the window are trained with more context, and a warning says so.

## Refused

finch trains text decoders:

{refused}

## Keys of torchtune's recipes that are refused

A config that merely names one of them, with the value in the second column, runs. The others are those of
[the recipe](recipe.md).

| key | passes | otherwise |
|---|---|---|
{keys}
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
