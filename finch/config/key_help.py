"""The keys as text: `finch keys`, and a recipe's ``--help``. Loads without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from finch.config.schema import LORA, LORA_FINETUNE, REQUIRED, SECTIONS, Option
from finch.config.unknown_keys import key_hint
from finch.errors import UserError


def key_options(options: Mapping[str, Option]) -> Iterator[tuple[str, Option]]:
    """Each key and its option; the keys of a block as ``checkpoint.every_n_steps``."""
    for key, option in options.items():
        if option.named_block is not None:
            yield key, option
            yield from ((f"{key}.NAME.{name}", inner) for name, inner in option.named_block.items())
        elif not option.block:
            yield key, option
        else:
            yield from ((f"{key}.{name}", inner) for name, inner in option.block.items())


def format_default(option: Option) -> str:
    if isinstance(option.default, dict):
        return option.default["_component_"]
    return {REQUIRED: "required", None: "null"}.get(option.default, str(option.default))


def format_keys(word: str | None = None) -> str:
    """A line for each key of both recipes, or for those whose name or description contains ``word``.

    Raises:
        UserError: no key contains it; names the nearest one.
    """
    sections = {
        title: {
            key: option
            for key, option in key_options(section)
            if word is None or word.lower() in f"{key} {option.help}".lower()
        }
        for title, section in {**SECTIONS, "LoRA (finch_lora_finetune)": LORA}.items()
    }
    if not any(sections.values()):
        known = dict(key_options(LORA_FINETUNE))
        raise UserError(f"no key contains {word}{key_hint(str(word), known) or '; `finch keys` lists them'}")
    width = max(len(key) for section in sections.values() for key in section)
    lines: list[str] = []
    for title, section in sections.items():
        lines += ["", title] if section else []
        for key, option in section.items():
            default = format_default(option)
            note = default if option.default is REQUIRED else f"default: {default}"
            lines.append(f"  {key:<{width}}  {option.help} [{option.expected}; {note}]")
    return "\n".join(lines[1:])


def recipe_help(recipe: str, options: Mapping[str, Option]) -> str:
    """What ``--help`` of a recipe prints."""
    sections = {**SECTIONS, "LoRA": {key: option for key, option in LORA.items() if key in options}}
    keys = "\n".join(
        textwrap.fill(" ".join(section), 120, initial_indent=f"  {title + ':':<26}", subsequent_indent=" " * 28)
        for title, section in sections.items()
        if section
    )
    return f"""usage: tune run [TORCHRUN-OPTIONS] {recipe} --config NAME_OR_PATH [key=value ...] [~key] [method=NAME]

  --config NAME_OR_PATH     a YAML file, or the name of a config that comes with finch: `finch configs`
  key=value                 overrides the file; optimizer.lr=1e-5 inside a block
  ~key                      removes a key or block
  method=NAME               trains with a method, or several joined by +: `finch methods`

keys, described by `finch keys`; `finch keys WORD` searches them:
{keys}"""
