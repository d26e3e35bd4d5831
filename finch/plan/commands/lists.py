"""`finch list`: what can stand in a config, each with what it is, and the configs themselves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.config.instantiate import config_names, did_you_mean, grid_names
from finch.plan.configs import copy_config, show_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=_KINDS, metavar="KIND", help=f"{', '.join(_KINDS)}; default: all")
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="only entries that contain it")
    for option, word, text in (
        ("--show", "key=value", "print a config with all defaults, changed by key=value and ~key as for `finch run`"),
        ("--copy", "FILE", "copy a config or a grid to a file (default: its own name, in this folder)"),
    ):
        action: Any = parser.add_argument(option, nargs="+", metavar=("NAME", word), help=text)
        action.completer = lambda **_: [*config_names(), *grid_names()]


def main(parsed: argparse.Namespace) -> None:
    """Raises UserError if no entry contains the word."""
    if parsed.show or parsed.copy:
        (show_config if parsed.show else copy_config)(*(parsed.show or parsed.copy))
        return
    for kind in [parsed.kind] if parsed.kind else _KINDS:
        print(_KINDS[kind](parsed.word) if parsed.kind else f"{kind}:\n\n{_KINDS[kind]('')}\n")


def _methods(word: str) -> str:
    from finch.config.methods import FOR_COMPARISONS, METHODS

    texts = {name: f"{name:<{max(map(len, METHODS))}}  {method.summary}" for name, method in METHODS.items()}
    found = _containing(word, texts, "method")
    apart = [found[name] for name in found if name in FOR_COMPARISONS]
    own = [text for text in found.values() if text not in apart]
    return "\n".join([*own, *(["\nfor comparisons, as papers have them:"] if apart else []), *apart])


def _models(word: str) -> str:
    from finch.models.hf_config import FAMILIES

    width = max(map(len, FAMILIES))
    texts = {
        model_type: f"{model_type:<{width}}  {family.name}\n"
        f"{'':<{width}}  models:   {', '.join(family.examples)}\n"
        f"{'':<{width}}  builders: {', '.join(family.builders)}\n"
        f"{'':<{width}}  training: full fine-tuning{' and method=lora' if family.has_lora else ''}"
        for model_type, family in FAMILIES.items()
    }
    return "\n".join(_containing(word, texts, "model").values()) + (
        "\n\nThe first column is model_type in a folder's config.json. model._component_=finch.models.auto with model.path=DIR "
        "builds any of them; `tune download ORG/NAME --output-dir DIR` downloads one."
    )


def _keys(word: str) -> str:
    """A line for each key of both recipes and of finch's components, or for those whose name or description contains ``word``. Raises UserError
    if none does, with the nearest one."""
    require_extras("finch list keys", "torchtune")
    from finch.config.key_search import ADAMW, format_default, key_hint, shown_keys
    from finch.config.schema import COMPONENTS, REQUIRED, SECTIONS, Lora, keys

    sections = {title: shown_keys(model) for title, model in SECTIONS.items()}
    sections["LoRA (finch_lora_finetune)"] = shown_keys(Lora)
    sections["_component_: torch.optim.AdamW"] = ADAMW
    for model in COMPONENTS:
        sections[f"_component_: {model.component}"] = {f"{model.key}.{name}": key for name, key in keys(model).items()}
    known = [name for section in sections.values() for name in section]
    for title, section in sections.items():
        component = title.partition("_component_: ")[2]
        sections[title] = {
            name: key for name, key in section.items() if word.lower() in f"{name} {key.help} {component}".lower()
        }
    if not any(sections.values()):
        by_last_name = {name.rpartition(".")[2]: name for name in known}
        hint = key_hint(word, [], by_last_name) or did_you_mean(word, known)
        raise UserError(f"no key contains {word}{hint or '; `finch list keys` lists them'}")
    width = max(len(name) for section in sections.values() for name in section)
    lines: list[str] = []
    for title, section in sections.items():
        lines += ["", title] if section else []
        for name, key in section.items():
            default = format_default(key)
            note = default if key.default is REQUIRED else f"default: {default}"
            lines.append(f"  {name:<{width}}  {key.help} [{key.expected}; {note}]")
    return "\n".join(lines[1:])


def _configs(word: str) -> str:
    names = {**config_names(), **grid_names()}
    width, texts = max(map(len, names)), {}
    for name, path in names.items():  # the first line is the schema's path
        texts[name] = f"{name:<{width}}  {path.read_text(encoding='utf-8').splitlines()[1][1:].strip()}"
    return "\n".join(_containing(word, texts, "config").values())


def _containing(word: str, texts: Mapping[str, str], what: str) -> dict[str, str]:
    """The texts that contain a word, whatever its case, by name. Raises UserError if none does; names the nearest name."""
    found = {name: text for name, text in texts.items() if word.lower() in text.lower()}
    if not found:
        raise UserError(f"no {what} contains {word}{did_you_mean(word, texts) or f'; `finch list {what}s` has all'}")
    return found


_KINDS = {"methods": _methods, "models": _models, "configs": _configs, "keys": _keys}
