"""`finch keys`, `methods` and `models`: what can stand in a config, each with what it is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from finch.base.extras import require_extras
from finch.cli.arguments import containing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="only entries that contain it")


def main(parsed: argparse.Namespace) -> None:
    """Raises UserError if no entry contains the word."""
    if parsed.command == "keys":
        require_extras("finch keys", "torchtune")
        from finch.config.key_search import format_keys

        print(format_keys(parsed.word or None))
        return
    texts = {"methods": _methods, "models": _models}[parsed.command]()
    print("\n".join(containing(parsed.word, texts, parsed.command.removesuffix("s"))))
    if parsed.command == "models":
        print(
            "\nThe first column is model_type in a folder's config.json. model._component_=finch.models.auto with model.path=DIR "
            "builds any of them; `tune download ORG/NAME --output-dir DIR` downloads one."
        )


def _methods() -> Mapping[str, str]:
    from finch.config.methods import METHODS

    return {name: f"{name:<{max(map(len, METHODS))}}  {method.summary}" for name, method in METHODS.items()}


def _models() -> Mapping[str, str]:
    from finch.models.hf_config import FAMILIES

    width = max(map(len, FAMILIES))
    return {
        model_type: f"{model_type:<{width}}  {family.name}\n"
        f"{'':<{width}}  models:   {', '.join(family.examples)}\n"
        f"{'':<{width}}  builders: {', '.join(family.builders)}\n"
        f"{'':<{width}}  training: full fine-tuning{' and method=lora' if family.has_lora else ''}"
        for model_type, family in FAMILIES.items()
    }
