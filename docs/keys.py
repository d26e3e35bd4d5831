"""Prints the table of keys for docs/recipe.md from finch.config.schema, so that the page and the code cannot differ."""

from collections.abc import Iterator

from finch.config.schema import FULL_FINETUNE, REQUIRED, Option


def _keys() -> Iterator[tuple[str, Option]]:
    for key, option in FULL_FINETUNE.items():
        yield from (
            [(f"{key}.{name}", inner) for name, inner in option.block.items()] if option.block else [(key, option)]
        )


def table() -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    for key, option in _keys():
        default = "required" if option.default is REQUIRED else option.default
        default = default["_component_"] if isinstance(default, dict) else "null" if default is None else default
        lines.append(f"| `{key}` | {default} | {option.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())
