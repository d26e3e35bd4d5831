"""`finch models`: the model families that finch trains. Needs no torch."""

from __future__ import annotations

from finch.models.family_table import FAMILIES


def list_models() -> None:
    """Prints each family: config.json's model_type, models of the Hugging Face hub, builders, and whether it has LoRA."""
    width = max(map(len, FAMILIES))
    for model_type, family in FAMILIES.items():
        print(f"{model_type:<{width}}  {family.name}")
        methods = "full fine-tuning and method=lora" if family.has_lora else "full fine-tuning"
        rows = {
            "models": ", ".join(family.examples),
            "builders": ", ".join(family.builders),
            "training": methods,
        }
        for title, text in rows.items():
            print(f"{'':<{width}}  {title + ':':<10}{text}")
    print(
        "\nThe first column is model_type in a folder's config.json. model._component_=finch.models.auto with model.path=DIR "
        "builds any of them; `tune download ORG/NAME --output-dir DIR` downloads one."
    )
