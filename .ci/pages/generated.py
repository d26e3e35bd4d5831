"""The site's pages that are made from the code: keys, commands, Python, and the keys of other trainers. Nothing of them is in the repository."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re

import coming_from

import finch.objectives
from finch.cli.main import main
from finch.config.key_search import ADAMW, format_default, shown_keys
from finch.config.schema import COMPONENTS, SECTIONS, UNSUPPORTED_KEYS, Key, Lora, keys


@functools.cache
def pages() -> dict[str, str]:
    """Each page's text by its path on the site."""
    return {
        "reference/keys.md": keys_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        **coming_from.pages(),
    }


def keys_page() -> str:
    text = [
        "# Keys of a config\n\nFrom the schema that checks every config. `finch list keys WORD` searches the same list in a terminal. "
        "A key is set in the file or on the command line: `finch run NAME epochs=3 optimizer.lr=1e-5`.\n"
    ]
    for title, model in {**SECTIONS, "LoRA": Lora}.items():
        text += [f"## {title}\n", table(shown_keys(model))]
    text.append(
        "## Arguments of finch's components\n\nA component is a block with a `_component_`, the path of a class or function.\n"
    )
    text += ["### `torch.optim.AdamW`\n\nUnder `optimizer`.\n", table(ADAMW)]
    for model in COMPONENTS:
        text += [
            f"### `{model.component}`\n\nUnder `{model.key}`.\n",
            table({f"{model.key}.{name}": key for name, key in keys(model).items()}),
        ]
    text.append(
        "## Keys that are refused\n\nKeys of torchtune's recipes. The value in the second column does nothing, and is accepted.\n\n"
        "| key | accepted | otherwise |\n|---|---|---|"
    )
    text += [
        f"| `{name}` | {'null' if key.no_op_value is None else key.no_op_value} | {key.remedy} |"
        for name, key in UNSUPPORTED_KEYS.items()
    ]
    return "\n".join(text)


def table(rows: dict[str, Key]) -> str:
    lines = [f"| `{name}` | {key.help} | {key.expected} | {format_default(key)} |" for name, key in rows.items()]
    return "\n".join(["| key | | values | default |", "|---|---|---|---|", *lines]).replace("<", "&lt;") + "\n"


def commands_page() -> str:
    """What `--help` prints, of each command and of the commands in it."""
    text = ["# Commands\n\nWhat `finch --help` and `finch COMMAND --help` print.\n", fenced(help_of())]
    for command in commands_in(help_of()):
        text += [f"## finch {command}\n", fenced(help_of(command))]
        for action in commands_in(help_of(command)) if "ACTION" in help_of(command) else ():
            text += [f"### finch {command} {action}\n", fenced(help_of(command, action))]
    return "\n".join(text)


@functools.cache
def help_of(*command: str) -> str:
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return out.getvalue().strip()


def commands_in(text: str) -> list[str]:
    """The commands that a help lists: the indented words that are no options."""
    return re.findall(r"^ {2,4}([a-z][a-z-]+)(?: {2,}\S.*)?$", text, re.MULTILINE)


def fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def python_page() -> str:
    """mkdocstrings reads the docstrings where a line has three colons."""
    exported = [getattr(finch.objectives, name) for name in finch.objectives.__all__]
    objectives = [each for each in exported if isinstance(each, type) and issubclass(each, finch.objectives.Objective)]
    parts = {
        "Schedules": ["finch.FinchLR", "finch.ReplayLR", "finch.optim.torch_lr.cosine_with_warmup"],
        "Callbacks": [
            "finch.integrations.transformers.FinchCallback",
            "finch.integrations.transformers.SelfReplay",
            "finch.integrations.lightning.FinchCallback",
        ],
        "Your own loop": [
            "finch.integrations.step_loss.MeanLoss",
            "finch.integrations.objective_loss.ObjectiveLoss",
            "finch.integrations.self_replay.own_answers",
            "finch.integrations.self_replay.replay_kl",
        ],
        "Objectives": [f"finch.objectives.{each.__name__}" for each in objectives],
        "Penalties": ["finch.objectives.regularization.L2", "finch.objectives.regularization.KL"],
        "Hooks": ["finch.training.hooks.Hook", "finch.training.hooks.Trainer"],
    }
    text = ["# Python\n\nWhat loops and configs of your own use, from the docstrings.\n"]
    for title, names in parts.items():
        text += [f"## {title}\n", *(f"::: {name}\n" for name in names)]
    return "\n".join(text)
