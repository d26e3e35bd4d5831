"""Writes the JSON schemas that editors complete and check YAML files with; a test compares.

finch/config/finch.schema.json is a config's, made from finch.config.schema. finch/config/grid.schema.json is that of a grid of
`finch sweep`. Numbers are accepted as YAML has them, and every value as a reference to another key, ``${KEY}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from finch.config.schema import (
    ALIASES,
    COMPONENTS,
    UNSUPPORTED_KEYS,
    Arguments,
    Json,
    Keys,
    LoraBuilder,
    LoraFinetuneKeys,
    PositiveInt,
)

FOLDER = Path(__file__).parents[2] / "finch" / "config"


class Evaluate(Keys):
    base: str | None = None
    """the pretrained model's folder; null: the config's checkpointer.checkpoint_dir"""
    suites: list[Any] | str | None = None
    """suites of `finch evaluate`; they or tasks must be given"""
    tasks: list[Any] | str | None = None
    """tasks of lm-eval, or of your own in include_path"""
    data_root: str | None = None
    """a folder of local data sets; null: the hub"""
    limit: PositiveInt | None = None
    """only so many documents of each task"""
    include_path: str | None = None
    """a folder with tasks of your own"""
    new_task: str | None = None
    """which of the tasks the runs learn"""
    select_by: str | None = None
    """a suite of the task's validation rows, such as knowledge_validation: RUN/best is the epoch that scores best on it; null: the run's own best"""


class Grid(Keys):
    """A grid of runs for `finch sweep`."""

    recipe: Literal["finch_full_finetune", "finch_lora_finetune"] | None = None
    """null: by each cell's model"""
    config: str
    """a file, or a name of `finch list configs`"""
    out: str
    """each cell is a folder in it"""
    keep: Literal["all", "best", "last"] = "all"
    """best or last: of a trained cell's models only that one, and no state to resume from"""
    overrides: dict[str, Any] | None = None
    """keys of all cells"""
    grid: dict[str, Any] | list[dict[str, Any]]
    """a mapping of keys to lists of values, or a list of them: the cells are the union of their products"""
    evaluate: Evaluate | None = None
    """arguments of `finch evaluate`, after training; null: none"""


_NAMED_COMPONENTS: Json = {
    "type": "object",
    "if": {"required": ["_component_"]},
    "then": {"shown": "component"},
    "else": {
        "additionalProperties": {"anyOf": [{"shown": "component"}, {"type": "array", "items": {"shown": "component"}}]}
    },
}
_DEFINITIONS: Json = {
    "reference": {
        "type": "string",
        "pattern": r"\$\{.+\}|^\?\?\?$",
        "description": "${KEY}, or ???: given on the command line",
    },
    # Without a dot, YAML 1.1 reads 1e-5 as text, and OmegaConf as a number.
    "number": {"type": "string", "pattern": r"^[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+$"},
}


def config_schema() -> Json:
    """The JSON schema of a config file, of either recipe. What the command line may give is not required.

    A file may define keys that others refer to: text, since a number is more often a misspelt key.
    """
    schema = LoraFinetuneKeys.model_json_schema()
    schema["properties"] |= {
        "method": {"type": "string", "description": "a method by name, or several joined by +: `finch list methods`"},
        "auto": {"type": "string", "description": "a function that completes the config, as configs/auto.yaml has it"},
        **{name: {"const": key.no_op_value, "description": key.remedy} for name, key in UNSUPPORTED_KEYS.items()},
        **{alias: schema["properties"][key] for alias, key in ALIASES.items()},
    }
    schema["properties"]["output_dir"]["type"] = ["string", "null"]  # null: `auto` chooses it
    del schema["required"]
    schema["additionalProperties"] = {"type": ["string", "null"], "description": "a key of your own, for ${KEY}"}
    schema["$defs"] |= {"component": _component_schema(), "named_components": _NAMED_COMPONENTS}
    return _completed(schema, "Keys of a config of finch's recipes")


def grid_schema() -> Json:
    """The JSON schema of a grid of `finch sweep`, which refers to that of a config."""
    config = {name: {"$ref": f"finch.schema.json#/properties/{name}"} for name in config_schema()["properties"]}
    values: Json = {name: {"type": "array", "minItems": 1, "items": node} for name, node in config.items()}
    values |= {"label": {"type": "string"}, "alpha": {"items": {"type": "number", "minimum": 0, "maximum": 1}}}
    schema = _completed(Grid.model_json_schema(), "A grid of runs for `finch sweep`")
    schema["$defs"]["values"] = {
        "type": "object",
        "minProperties": 1,
        "properties": values,
        "additionalProperties": {"type": "array"},
    }
    schema["properties"]["overrides"]["anyOf"][0] = {"type": "object", "properties": config}
    schema["properties"]["grid"]["anyOf"] = [
        {"$ref": "#/$defs/values"},
        {"type": "array", "items": {"$ref": "#/$defs/values"}},
    ]
    return schema


def _completed(schema: Json, title: str) -> Json:
    plain = _plain({**schema, "$defs": {**schema["$defs"], **_DEFINITIONS}})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **plain, "title": title}


def _component_schema() -> Json:
    """Of any component; the arguments of finch's own are checked."""
    known = {"enum": [model.component for model in COMPONENTS if model is not LoraBuilder]}
    path = {"anyOf": [known, {"type": ["string", "null"]}], "description": "dotted path of a class or function"}
    arguments = [
        {
            "if": {"properties": {"_component_": {"pattern": model.paths()}}, "required": ["_component_"]},
            "then": _arguments_schema(model),
        }
        for model in COMPONENTS
    ]
    return {"anyOf": [{"type": "object", "properties": {"_component_": path}, "allOf": arguments}, {"type": "string"}]}


def _arguments_schema(model: type[Arguments]) -> Json:
    schema = model.model_json_schema()
    schema.pop("required", None)
    weight = {"weight": {"type": "number", "exclusiveMinimum": 0, "description": "how often a list's entry is drawn"}}
    schema["properties"] |= {"_component_": True, **(weight if model.key == "dataset" else {})}
    return schema


def _plain(node: Any) -> Any:
    """Replaces what only this module understands, and lets every property be a reference to another key."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    definition = {"component": "component", "component, named components": "named_components"}.get(
        node.get("shown", "")
    )
    if definition is not None:
        about = {name: node[name] for name in ("description", "default") if name in node}
        return {**about, "allOf": [{"$ref": f"#/$defs/{definition}"}]}
    plain = {name: _plain(value) for name, value in node.items() if name not in ("title", "shown")}
    if "properties" in node:
        plain["properties"] = {name: _or_reference(value) for name, value in plain["properties"].items()}
    if "items" in node:
        plain["items"] = _or_reference(plain["items"])
    return plain


def _or_reference(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    about = {name: node.pop(name) for name in ("description", "default") if name in node}
    members = node.get("anyOf", [node])
    is_number = any(member.get("type") in ("integer", "number") for member in members)
    references = [{"$ref": f"#/$defs/{name}"} for name in ("number", "reference") if is_number or name == "reference"]
    return {**about, "anyOf": [*members, *references]}


def texts() -> dict[Path, str]:
    """The content of each file."""
    schemas = {FOLDER / "finch.schema.json": config_schema(), FOLDER / "grid.schema.json": grid_schema()}
    return {path: json.dumps(schema, indent=1) + "\n" for path, schema in schemas.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
