"""Prints docs/recipe.md's table of keys from finch.config.schema; a test compares the two."""

from finch.config.key_search import format_default, shown_keys
from finch.config.schema import FullFinetuneKeys


def table() -> str:
    rows = [
        f"| `{key}` | {option.expected} | {format_default(option)} | {option.help} |"
        for key, option in shown_keys(FullFinetuneKeys).items()
    ]
    return "\n".join(["| key | values | default | |", "|---|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table())
