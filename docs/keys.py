"""Prints the table of keys for docs/recipe.md from finch.options, so that the page and the code cannot differ."""

from finch.options import FULL_FINETUNE, REQUIRED


def table() -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    for key, option in FULL_FINETUNE.items():
        default = "required" if option.default is REQUIRED else option.default
        default = default["_component_"] if isinstance(default, dict) else "null" if default is None else default
        lines.append(f"| `{key}` | {default} | {option.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())
