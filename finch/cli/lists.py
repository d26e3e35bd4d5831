"""`finch list`: what can stand in a config, each with what it is, and the configs themselves."""

from __future__ import annotations

import argparse
from typing import Any

from finch.base.extras import require_extras
from finch.cli.arguments import containing
from finch.cli.configs import copy_config, show_config
from finch.config.instantiate import config_names, grid_names


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
    found = containing(word, texts, "method")
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
    return "\n".join(containing(word, texts, "model").values()) + (
        "\n\nThe first column is model_type in a folder's config.json. model._component_=finch.models.auto with model.path=DIR "
        "builds any of them; `tune download ORG/NAME --output-dir DIR` downloads one."
    )


def _keys(word: str) -> str:
    require_extras("finch list keys", "torchtune")
    from finch.config.key_search import format_keys

    return format_keys(word or None)


def _configs(word: str) -> str:
    names = {**config_names(), **grid_names()}
    width, texts = max(map(len, names)), {}
    for name, path in names.items():  # the first line is the schema's path
        texts[name] = f"{name:<{width}}  {path.read_text(encoding='utf-8').splitlines()[1][1:].strip()}"
    return "\n".join(containing(word, texts, "config").values())


_KINDS = {"methods": _methods, "models": _models, "configs": _configs, "keys": _keys}
