"""Imports point one way: a package imports those below it, never those above; modules form no circle."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import ROOT
from packaging.requirements import Requirement

import finch

CORE = (
    ("base",),
    ("optim", "objectives"),
    ("config",),
    ("distributed",),
    ("models", "checkpoint", "data"),
    ("weights",),
    ("training",),
    ("probes",),
    ("cli",),
)
"""What a training step needs, and what starts one: a package imports those of the lines above it."""
ROOMS = {"plan": (), "evaluation": ("integrations",), "study": ("evaluation",), "integrations": ()}
"""What lies around the core: a room imports the core, itself, and those named here; the core imports none of them."""
BELOW = {
    package: {*(each for layer in CORE[:height] for each in layer), package}
    for height, layer in enumerate(CORE)
    for package in layer
} | {room: {room, *others, *(each for layer in CORE for each in layer)} for room, others in ROOMS.items()}
TORCH_ALONE = ("finch", "finch.base", "finch.optim", "finch.objectives")
RECIPE_USERS = ("gpu_check.runs",)
"""What runs whole recipes in its own process."""
BUDGET = 13_556
"""Of the core, in lines of code. It may fall; what would raise it belongs into a room, or replaces something."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
EXTRAS = ("torchtune", "evaluate", "report", "openai", "hf", "lightning", "titan", "trackio")
"""Whose packages finch itself imports."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "finch").rglob("*.py")
}


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """The modules a file imports; with ``top_level`` those alone that are imported when the file is."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: write imports in full"
            for alias in node.names:
                yield name if (name := f"{node.module}.{alias.name}") in MODULES else node.module


def package_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"finch"}))
def test_imports_point_down(module: str) -> None:
    own = package_of(module)
    for name in imports(MODULES[module]):
        if name.startswith("finch."):
            assert package_of(name) in BELOW[own], f"{module} imports {name}, which is not below it"


def test_modules_form_no_circle() -> None:
    below = {module: {name for name in imports(path) if name in MODULES} - {module} for module, path in MODULES.items()}
    left = dict(below)
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import each other: {sorted(left)}"


def test_core_needs_torch_alone() -> None:
    for module in MODULES:
        if module in TORCH_ALONE or module.rpartition(".")[0] in TORCH_ALONE[1:]:
            needed = {name.split(".")[0] for name in imports(MODULES[module], top_level=True)}
            assert needed <= {"finch", "torch", *sys.stdlib_module_names}, module


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [text for name in EXTRAS for text in project["optional-dependencies"][name]]
    declared = {Requirement(text).name.replace("-", "_") for text in texts}
    for path in (*MODULES.values(), *(ROOT / "recipes").glob("*.py")):
        names = {name.split(".")[0] for name in imports(path)}
        names -= {"yaml"} if "pyyaml" in declared else set()
        assert names <= {"finch", "finch_full_finetune", *declared, *sys.stdlib_module_names}, path


def test_core_names_rooms_in_these_places_alone() -> None:
    """A component named by a string is an import that no reader of imports sees."""
    rooms = tuple(f"finch.{room}" for room in ROOMS)
    paths = [*rooms, *(public for public, path in finch._Aliases.PATHS.items() if path.startswith(rooms))]
    is_room = re.compile(rf"({'|'.join(map(re.escape, paths))})(\.\w+)*")
    named = {
        (module, node.value)
        for module, path in MODULES.items()
        if module != "finch" and package_of(module) not in ROOMS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_room.fullmatch(node.value)
    }
    assert named == {
        ("finch.probes.run_hooks", "finch.evaluation.average.Average"),
    }


def test_recipe_is_imported_by_these_alone() -> None:
    users = {module for module, path in MODULES.items() if "finch_full_finetune" in set(imports(path))}
    assert users == {f"finch.plan.{name}" for name in RECIPE_USERS}


def test_core_stays_within_its_budget() -> None:
    """Lines of code, without comments, docstrings and blank ones."""
    total = 0
    for module, path in MODULES.items():
        if module == "finch" or package_of(module) not in ROOMS:
            source = path.read_text()
            strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
            docs = (
                each for each in strings if isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
            )
            left_out = {number for each in docs for number in range(each.lineno, (each.end_lineno or 0) + 1)}
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            code = {
                line
                for token in tokens
                if token.type not in NO_CODE
                for line in range(token.start[0], token.end[0] + 1)
            }
            total += len(code - left_out)
    assert total <= BUDGET
